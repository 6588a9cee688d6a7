// What the compiled norms are made of: vectors of the three dtypes, torch's order of a sum, work on torch's threads.
//
// Plain C++17 with the vector extensions of GCC and Clang. Arithmetic is float32, each operation rounded once.

#pragma once

#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX2__) && defined(__F16C__)
#define X86 1
#include <immintrin.h>
#endif

// A vector that is handed to a function goes by way of memory.
#define ALWAYS __attribute__((always_inline))
#define INLINE inline ALWAYS

namespace {

enum Type { kFloat = 0, kHalf = 1, kBrain = 2, kNone = -1 };

INLINE int64_t size_of(int64_t type) { return type == kFloat ? 4 : 2; }

template <int L>
struct Lanes {
  typedef float F __attribute__((vector_size(4 * L)));
  typedef int32_t I __attribute__((vector_size(4 * L)));
  typedef uint32_t U __attribute__((vector_size(4 * L)));
  typedef uint16_t S __attribute__((vector_size(2 * L)));
};

#if defined(__AVX512F__)
constexpr int kWide = 16;
#else
constexpr int kWide = 8;
#endif
typedef Lanes<kWide>::F Vec;
typedef Lanes<kWide>::I Mask;
typedef Lanes<kWide>::U Bits;

template <int L>
INLINE typename Lanes<L>::U choose(typename Lanes<L>::I mask, typename Lanes<L>::U yes, typename Lanes<L>::U no) {
  return mask ? yes : no;
}

struct Float {
  typedef float T;
  template <int L>
  static INLINE typename Lanes<L>::F widen(typename Lanes<L>::F v) { return v; }
  template <int L>
  static INLINE typename Lanes<L>::F narrow(typename Lanes<L>::F v) { return v; }
  template <int L>
  static INLINE typename Lanes<L>::F round(typename Lanes<L>::F v) { return v; }
  template <int L>
  struct Stored { typedef typename Lanes<L>::F V; };
};

// 16-bit words to and from the low halves of 32-bit words. What compilers make of __builtin_convertvector is several
// times slower than the one instruction that there is for it.
template <int L>
INLINE typename Lanes<L>::U extend(typename Lanes<L>::S v) {
  typedef typename Lanes<L>::U U;
#if X86
#if defined(__AVX512F__)
  if constexpr (L == 16) return (U)_mm512_cvtepu16_epi32((__m256i)v);
#endif
  if constexpr (L == 8) return (U)_mm256_cvtepu16_epi32((__m128i)v);
#endif
  return __builtin_convertvector(v, U);
}

template <int L>
INLINE typename Lanes<L>::S truncate(typename Lanes<L>::U v) {
  typedef typename Lanes<L>::S S;
#if X86
#if defined(__AVX512F__)
  if constexpr (L == 16) return (S)_mm512_cvtepi32_epi16((__m512i)v);
#endif
  if constexpr (L == 8) {
    const __m256i packed = _mm256_packus_epi32((__m256i)v, (__m256i)v);
    return (S)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  }
#endif
  return __builtin_convertvector(v, S);
}

struct Brain {
  typedef uint16_t T;
  template <int L>
  struct Stored { typedef typename Lanes<L>::S V; };
  template <int L>
  static INLINE typename Lanes<L>::F widen(typename Lanes<L>::S v) {
    return (typename Lanes<L>::F)(extend<L>(v) << 16);
  }
  // The number as the upper half of a word; a NaN stays one.
  template <int L>
  static INLINE typename Lanes<L>::U nearest(typename Lanes<L>::F v) {
    typedef typename Lanes<L>::U U;
    const U bits = (U)v;
    return choose<L>(v != v, bits | 0x400000u, bits + 0x7fffu + ((bits >> 16) & 1u));
  }
  template <int L>
  static INLINE typename Lanes<L>::S narrow(typename Lanes<L>::F v) {
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
    // The machine's own rounding takes denormal numbers, and them alone, for zeros.
    constexpr int kDenormal = 0x20;
    if constexpr (L == 16)
      if (__builtin_expect(!_mm512_fpclass_ps_mask((__m512)v, kDenormal), 1))
        return (typename Lanes<L>::S)_mm512_cvtneps_pbh((__m512)v);
#endif
    return truncate<L>(nearest<L>(v) >> 16);
  }
  template <int L>
  static INLINE typename Lanes<L>::F round(typename Lanes<L>::F v) {
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
    if constexpr (L == 16) return widen<L>(narrow<L>(v));
#endif
    return (typename Lanes<L>::F)(nearest<L>(v) & 0xffff0000u);
  }
};

struct Half {
  typedef uint16_t T;
  template <int L>
  struct Stored { typedef typename Lanes<L>::S V; };
  template <int L>
  static INLINE typename Lanes<L>::F widen(typename Lanes<L>::S v) {
    typedef typename Lanes<L>::F F;
#if X86
#if defined(__AVX512F__)
    if constexpr (L == 16) return (F)_mm512_cvtph_ps((__m256i)v);
#endif
    if constexpr (L == 8) return (F)_mm256_cvtph_ps((__m128i)v);
#endif
    _Float16 half[L];
    memcpy(half, &v, sizeof v);
    F out{};
    for (int i = 0; i < L; i++) out[i] = (float)half[i];
    return out;
  }
  template <int L>
  static INLINE typename Lanes<L>::S narrow(typename Lanes<L>::F v) {
    typedef typename Lanes<L>::S S;
#if X86
#if defined(__AVX512F__)
    if constexpr (L == 16) return (S)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
    if constexpr (L == 8) return (S)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#endif
    _Float16 half[L];
    for (int i = 0; i < L; i++) half[i] = (_Float16)v[i];
    S out;
    memcpy(&out, half, sizeof out);
    return out;
  }
  template <int L>
  static INLINE typename Lanes<L>::F round(typename Lanes<L>::F v) { return widen<L>(narrow<L>(v)); }
};

// The first n of L numbers at p; zeros for the others.
template <class H, int L>
INLINE typename Lanes<L>::F load(const typename H::T* p, int64_t n = L) {
  typedef typename H::template Stored<L>::V V;
  if (n >= L) {
    V whole;
    memcpy(&whole, p, sizeof whole);
    return H::template widen<L>(whole);
  }
  V part{};
  memcpy(&part, p, n * sizeof(typename H::T));
  return H::template widen<L>(part);
}

template <class H>
INLINE void store(typename H::T* p, Vec v, int64_t n = kWide) {
  const auto narrow = H::template narrow<kWide>(v);
  if (n >= kWide) memcpy(p, &narrow, sizeof narrow);
  else memcpy(p, &narrow, n * sizeof(typename H::T));
}

// Calls a function of a position and of how many numbers stand there, which the compiler knows for all but the last.
template <class Step>
INLINE void each(int64_t width, Step step) {
  int64_t j = 0;
  for (; j + kWide <= width; j += kWide) step(j, kWide);
  if (j < width) step(j, width - j);
}

INLINE Vec load_any(const void* p, int64_t type, int64_t j, int64_t n) {
  if (type == kFloat) return load<Float, kWide>((const float*)p + j, n);
  if (type == kHalf) return load<Half, kWide>((const uint16_t*)p + j, n);
  return load<Brain, kWide>((const uint16_t*)p + j, n);
}

INLINE void store_any(void* p, int64_t type, int64_t j, Vec v, int64_t n) {
  if (type == kFloat) return store<Float>((float*)p + j, v, n);
  if (type == kHalf) return store<Half>((uint16_t*)p + j, v, n);
  store<Brain>((uint16_t*)p + j, v, n);
}

INLINE Vec round_to(Vec v, int64_t type) {
  if (type == kBrain) return Brain::round<kWide>(v);
  if (type == kHalf) return Half::round<kWide>(v);
  return v;
}

INLINE float add_lanes(Vec v) {
  float total = 0;
  for (int i = 0; i < kWide; i++) total += v[i];
  return total;
}

// e to the power of x, within about a unit in the last place, from denormal numbers to infinity; a NaN stays one.
// x = k * ln 2 + r with |r| <= ln 2 / 2 (and a little), and e^r by its Taylor series, of which r^8 / 8! < 6e-9 is left
// out. ln 2 is cut into 15 bits, whose product with k is exact, and the rest.
INLINE Vec exponential(Vec x) {
  // Past these e^x rounds to infinity and to 0, and k would leave the exponents below.
  x = (Vec)choose<kWide>(x > 89.0f, (Bits)(Vec{} + 89.0f), (Bits)x);
  x = (Vec)choose<kWide>(x < -104.0f, (Bits)(Vec{} - 104.0f), (Bits)x);
  const float whole = 12582912.0f;
  const Vec shifted = x * 0x1.715476p+0f + whole, k = shifted - whole;
  const Vec r = (x - k * 0x1.62e4p-1f) - k * 0x1.7f7d1cp-20f;
  Vec tail = Vec{} + 1.0f / 5040;
  tail = tail * r + 1.0f / 720;
  tail = tail * r + 1.0f / 120;
  tail = tail * r + 1.0f / 24;
  tail = tail * r + 1.0f / 6;
  tail = tail * r + 1.0f / 2;
  const Vec power = (tail * r * r + r) + 1.0f;
  // By 2^k in two steps, neither of which leaves the exponents; the first is exact.
  const Mask steps = (Mask)((Bits)shifted - (Bits)(Vec{} + whole)), half = steps >> 1;
  return power * (Vec)((half + 127) << 23) * (Vec)((steps - half + 127) << 23);
}

enum Activation { kSilu = 0, kSigmoid = 1 };

// The activation of a gate, and its derivative; rounded where cpu_blocks.py rounds.
INLINE Vec activate(Vec gate, int64_t activation) {
  const Vec below = exponential(-gate) + 1.0f;
  return (activation == kSigmoid ? Vec{} + 1.0f : gate) / below;
}
INLINE Vec activate(Vec gate, int64_t activation, Vec& slope) {
  const Vec below = exponential(-gate) + 1.0f, sigmoid = 1.0f / below;
  const Vec activated = activation == kSigmoid ? sigmoid : gate / below;
  const Vec rest = 1.0f - sigmoid;
  slope = activation == kSigmoid ? sigmoid * rest : sigmoid + activated * rest;
  return activated;
}

// Squares of a row, summed in the order of torch's sum over a dense last dimension with vectors of L floats:
// four interleaved sums, each a cascade of four levels; then the tail, and the lanes one after the other.
template <class H, int L>
float sum_squares(const typename H::T* row, int64_t width) {
  typedef typename Lanes<L>::F F;
  const int64_t vectors = width / L, size = vectors / 4;
  int64_t ceil_log2 = 0;
  while (((int64_t)1 << ceil_log2) < size) ceil_log2++;
  const int64_t power = ceil_log2 / 4 > 4 ? ceil_log2 / 4 : 4, step = (int64_t)1 << power;
  F upper[3][4] = {}, sums[4] = {};
  int64_t i = 0;
  while (i + step <= size) {
    for (int64_t end = i + step; i < end; i++)
      for (int k = 0; k < 4; k++) {
        F v = load<H, L>(row + (4 * i + k) * L);
        sums[k] += v * v;
      }
    for (int level = 0; level < 3; level++) {
      F* below = level ? upper[level - 1] : sums;
      for (int k = 0; k < 4; k++) {
        upper[level][k] += below[k];
        below[k] = F{};
      }
      if (i & ((step - 1) << ((level + 1) * power))) break;
    }
  }
  for (; i < size; i++)
    for (int k = 0; k < 4; k++) {
      F v = load<H, L>(row + (4 * i + k) * L);
      sums[k] += v * v;
    }
  for (int level = 0; level < 3; level++)
    for (int k = 0; k < 4; k++) sums[k] += upper[level][k];
  for (int64_t j = 4 * size; j < vectors; j++) {
    F v = load<H, L>(row + j * L);
    sums[0] += v * v;
  }
  for (int k = 1; k < 4; k++) sums[0] += sums[k];
  if (L == 1) return sums[0][0];
  float total = 0;
  for (int64_t j = vectors * L; j < width; j++) {
    float v = load<H, 1>(row + j)[0];
    total += v * v;
  }
  for (int k = 0; k < L; k++) total += sums[0][k];
  return total;
}

template <class H>
INLINE float sum_squares_as_torch(const typename H::T* row, int64_t width, int64_t lanes) {
  if (width < lanes) return sum_squares<H, 1>(row, width);
  if (lanes == 16) return sum_squares<H, 16>(row, width);
  if (lanes == 8) return sum_squares<H, 8>(row, width);
  return sum_squares<H, 4>(row, width);
}

// Looks at a counter, some 50 microseconds, before a thread yields its core.
constexpr int kPatience = 2000;

// Work on torch's own threads. A thread that finds no more work waits a little and then yields its core until all have
// arrived: the barrier at the end of the region, which spins, is then passed at once.
typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);
struct Region {
  void (*work)(const void*, int64_t);
  void (*finish)(const void*, int64_t);
  const void* call;
  int64_t chunks, last_chunks, next, done, last_next, arrived;
  int (*team)();
};

// The others are mostly a few microseconds behind, and who yields to another process comes back milliseconds later.
void wait_for(const int64_t* counter, int64_t least) {
  for (int i = 0; __atomic_load_n(counter, __ATOMIC_ACQUIRE) < least; i++) {
    if (i >= kPatience) sched_yield();
#if X86
    else _mm_pause();
#endif
  }
}

void run(void* argument) {
  Region* region = (Region*)argument;
  int64_t i;
  while ((i = __atomic_fetch_add(&region->next, 1, __ATOMIC_RELAXED)) < region->chunks) {
    region->work(region->call, i);
    __atomic_fetch_add(&region->done, 1, __ATOMIC_RELEASE);
  }
  if (region->finish) {
    wait_for(&region->done, region->chunks);
    while ((i = __atomic_fetch_add(&region->last_next, 1, __ATOMIC_RELAXED)) < region->last_chunks)
      region->finish(region->call, i);
  }
  if (!region->team) return;
  const int64_t team = region->team();
  __atomic_fetch_add(&region->arrived, 1, __ATOMIC_ACQ_REL);
  wait_for(&region->arrived, team);
}

struct Threads {
  Parallel parallel;  // GOMP_parallel of the OpenMP library that torch has loaded
  int (*team)();      // omp_get_num_threads of the same
  int64_t count;      // threads to use at most
};

void run_all(const Threads& threads, Region region) {
  if (threads.count <= 1) return run(&region);
  region.team = threads.team;
  threads.parallel(run, &region, (unsigned)threads.count, 0);
}

struct Tensor {
  const void* data;
  int64_t type, row_stride, group_stride;  // strides in elements
  inline const void* at(int64_t r, int64_t g) const {
    return (const char*)data + (r * row_stride + g * group_stride) * size_of(type);
  }
};

// Gain or bias as float32, with the offset.
struct Parameter {
  const void* data;
  int64_t type;
};

const float* widen_parameter(const Parameter& p, double offset, bool has_offset, int64_t size, float** owned) {
  *owned = nullptr;
  if (!p.data) return nullptr;
  if (p.type == kFloat && !has_offset) return (const float*)p.data;
  float* wide = *owned = (float*)malloc(size * sizeof(float) + 64);
  each(size, [&](int64_t j, int64_t n) ALWAYS {
    const Vec v = load_any(p.data, p.type, j, n);
    store<Float>(wide + j, has_offset ? v + (float)offset : v, n);
  });
  return wide;
}
}  // namespace

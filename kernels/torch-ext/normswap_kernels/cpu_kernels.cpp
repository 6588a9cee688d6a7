// The compiled CPU path: RMSNorm (with residual sum, with gate, with quantization) and the gradients of RMSNorm and
// LayerNorm.
//
// cpu_compiled.py builds this file and hands over each call as one struct of 8-byte fields, packed in the order that
// they have here. Each operation rounds once (no contraction) and squares are summed in the order of torch's sum, so
// the results of a forward are bit for bit those of torch's operations; but for gates, since torch's exponential has
// last digits of its own.

#include "cpu_vectors.h"

namespace {

enum Quantized { kInt8 = 1, kFloat8 = 2 };
enum Gate { kUngated = 0, kBefore = 1, kAfter = 2 };

struct Forward {
  Threads threads;
  int64_t rows, groups, width;
  Tensor x, residual, gate;      // data is null where there is none
  Parameter weight, bias;
  void *y, *summed, *values;     // (rows, groups, width) dense; y is null where values (quantized) are wanted
  float *scales, *rstd;          // (rows, groups); null where not wanted
  int64_t sum_type, out_type;
  int64_t middle, product;       // types that the row and its product with the gain are rounded to; kNone
  int64_t scale_type;            // likewise, of the scale of a row
  int64_t quantized;             // of the values
  int64_t gated, activation;
  int64_t counted, lanes;        // leading elements that the moment is taken of; lanes of torch's sum
  int64_t has_offset;
  double divisor, eps, offset;   // of the sum of squares; of the formula
  int64_t rows_per_chunk;
  const float *gain, *shift;     // filled in here
};

template <class S>
INLINE void add_row(const Forward& c, const void* x, const void* residual, typename S::T* sum) {
  const int64_t x_type = c.x.type, residual_type = c.residual.type;
  each(c.width, [&](int64_t j, int64_t n) ALWAYS {
    store<S>(sum + j, load_any(x, x_type, j, n) + load_any(residual, residual_type, j, n), n);
  });
}

INLINE float round_scale(float scale, int64_t type) {
  return type > 0 ? round_to(Vec{} + scale, type)[0] : scale;
}

template <class S>
float find_scale(const Forward& c, const typename S::T* row) {
  const float moment = sum_squares_as_torch<S>(row, c.counted, c.lanes) / (float)c.divisor;
  return 1.0f / sqrtf((float)c.eps + moment);
}

void quantize_row(const Forward& c, const float* row, float largest, int64_t index) {
  const float most = c.quantized == kInt8 ? 127.0f : 448.0f, scale = largest / most;
  c.scales[index] = scale;
  uint8_t* values = (uint8_t*)c.values + index * c.width;
  typedef uint8_t Bytes __attribute__((vector_size(kWide)));
  for (int64_t j = 0; j < c.width; j += kWide) {
    const int64_t n = c.width - j < kWide ? c.width - j : kWide;
    Vec v = load<Float, kWide>(row + j, n) / scale;
    // What is not finite stands for no number.
    const Bits number = (Bits)v & (Bits)(((Bits)v & 0x7fffffffu) < 0x7f800000u);
    const Bits sign = number & 0x80000000u;
    Bits bits = number & 0x7fffffffu;
    bits = choose<kWide>((Vec)bits > most, (Bits)(Vec{} + most), bits);
    Bytes out;
    if (c.quantized == kInt8) {
      // Past 2^23 float32 has no digits behind the point, and the sum is rounded to nearest even.
      const Vec whole = ((Vec)(bits | sign) + 12582912.0f) - 12582912.0f;
      out = __builtin_convertvector(__builtin_convertvector(whole, Mask), Bytes);
    } else {
      // Below 2^-6 the last digit of e4m3 is 2^-9, which is that of float32 at 2^14.
      const Bits small = (Bits)((Vec)bits + 16384.0f) - (Bits)(Vec{} + 16384.0f);
      const Bits usual = (bits - (120u << 23) + 0x7ffffu + ((bits >> 20) & 1u)) >> 20;
      out = __builtin_convertvector(choose<kWide>((Mask)(bits < (121u << 23)), small, usual) | (sign >> 24), Bytes);
    }
    memcpy(values + j, &out, n);
  }
}

// What is done with a row beside its norm. With a gate the other type is looked up as the row is written.
enum Extra { kNothing, kQuantize, kGateAfter };

template <class S, class Y, Extra kExtra>
void normalise_row(const Forward& c, const typename S::T* in, int64_t r, int64_t g, float* room) {
  const int64_t index = r * c.groups + g, width = c.width;
  const float exact = find_scale<S>(c, in), scale = round_scale(exact, c.scale_type);
  if (c.rstd) c.rstd[index] = exact;
  const float* gain = c.gain ? c.gain + g * width : nullptr;
  const float* shift = c.shift ? c.shift + g * width : nullptr;
  void* y = (char*)c.y + index * width * size_of(c.out_type);
  const int64_t middle = c.middle, product = c.product;
  const void* gate = kExtra == kGateAfter ? c.gate.at(r, g) : nullptr;
  Vec largest{};
  Mask unordered{};
  each(width, [&](int64_t j, int64_t n) ALWAYS {
    Vec v = load<S, kWide>(in + j, n) * scale;
    if (middle > 0) v = round_to(v, middle);
    if (gain) {
      v *= load<Float, kWide>(gain + j, n);
      if (product > 0) v = round_to(v, product);
    }
    if (shift) v += load<Float, kWide>(shift + j, n);
    if (kExtra == kGateAfter)
      return store_any(y, c.out_type, j, v * activate(load_any(gate, c.gate.type, j, n), c.activation), n);
    if (kExtra == kNothing) return store<Y>((typename Y::T*)y + j, v, n);
    v = Y::template round<kWide>(v);
    store<Float>(room + j, v, n);
    if (n < kWide)
      for (int64_t i = n; i < kWide; i++) v[i] = 0;
    const Vec magnitude = (Vec)((Bits)v & 0x7fffffffu);
    unordered |= magnitude != magnitude;
    largest = (Vec)choose<kWide>(magnitude > largest, (Bits)magnitude, (Bits)largest);
  });
  if (kExtra != kQuantize) return;
  float most = 0;
  for (int i = 0; i < kWide; i++) {
    if (unordered[i]) most = NAN;
    if (largest[i] > most) most = largest[i];
  }
  quantize_row(c, room, most, index);
}

template <class S, class Y, Extra kExtra>
void forward_row(const Forward& c, int64_t r, int64_t g, float* room) {
  const void* row = c.x.at(r, g);
  if (c.residual.data) {
    typename S::T* sum = (typename S::T*)c.summed + (r * c.groups + g) * c.width;
    add_row<S>(c, row, c.residual.at(r, g), sum);
    row = sum;
  }
  if (kExtra != kNothing || c.gated != kBefore)
    return normalise_row<S, Y, kExtra>(c, (const typename S::T*)row, r, g, room);
  const void* gate = c.gate.at(r, g);
  each(c.width, [&](int64_t j, int64_t n) ALWAYS {
    const Vec v = load<S, kWide>((const typename S::T*)row + j, n);
    store<Float>(room + j, v * activate(load_any(gate, c.gate.type, j, n), c.activation), n);
  });
  normalise_row<Float, Y, kNothing>(c, room, r, g, nullptr);
}

template <class S, class Y, Extra kExtra>
void forward_chunk(const void* call, int64_t chunk) {
  const Forward& c = *(const Forward*)call;
  float* room = c.values || c.gated == kBefore ? (float*)malloc(c.width * sizeof(float)) : nullptr;
  const int64_t begin = chunk * c.rows_per_chunk, end = begin + c.rows_per_chunk;
  for (int64_t r = begin; r < end && r < c.rows; r++)
    for (int64_t g = 0; g < c.groups; g++) forward_row<S, Y, kExtra>(c, r, g, room);
  free(room);
}

typedef void (*Work)(const void*, int64_t);

// A narrow row gives a result of its own type or float; a row of float gives any.
template <template <class, class> class Choice>
Work choose_types(int64_t row, int64_t other) {
  if (row == kHalf) return other == kHalf ? Choice<Half, Half>::work : Choice<Half, Float>::work;
  if (row == kBrain) return other == kBrain ? Choice<Brain, Brain>::work : Choice<Brain, Float>::work;
  if (other == kHalf) return Choice<Float, Half>::work;
  return other == kBrain ? Choice<Float, Brain>::work : Choice<Float, Float>::work;
}

template <template <class> class Choice>
Work choose_type(int64_t row) {
  if (row == kHalf) return Choice<Half>::work;
  return row == kBrain ? Choice<Brain>::work : Choice<Float>::work;
}

template <class S, class Y>
struct Normalise { static constexpr Work work = forward_chunk<S, Y, kNothing>; };
template <class S, class Y>
struct NormaliseAndQuantize { static constexpr Work work = forward_chunk<S, Y, kQuantize>; };
template <class S>
struct NormaliseAndGate { static constexpr Work work = forward_chunk<S, Float, kGateAfter>; };

struct Backward {
  Threads threads;
  int64_t rows, groups, width;
  Tensor grad, grad_sum, row, gate;  // data is null where there is none
  Parameter weight;
  void *drow, *dgate;            // (rows, groups, width) dense, of the types of row and gate
  const float *rstd, *mean;      // (rows, groups); mean is null for RMSNorm
  float *dgain, *dshift;         // (groups, width); null where not wanted
  int64_t gated, activation, has_offset;
  int64_t scale_type;            // that the forward rounded the scale to; kNone
  double offset, share;          // share: what one square counts in the moment
  int64_t rows_per_chunk;
  const float* gain;             // filled in here
  float* partial;                // of each chunk: what it adds to dgain and dshift
};

// Numbers that are added up one after the other before a sum of sums is begun.
constexpr int64_t kRun = 64;

template <class H, class G, bool kCentred, Gate kGate>
void backward_row(const Backward& c, int64_t r, int64_t g, float* dgain, float* dshift, float* room) {
  const int64_t index = r * c.groups + g, width = c.width;
  const typename H::T* row = (const typename H::T*)c.row.at(r, g);
  const void* grad = c.grad.at(r, g);
  const void* grad_sum = c.grad_sum.data ? c.grad_sum.at(r, g) : nullptr;
  const void* gate = kGate != kUngated ? c.gate.at(r, g) : nullptr;
  typename H::T* drow = (typename H::T*)c.drow + index * width;
  const float* gain = c.gain ? c.gain + g * width : nullptr;
  if (dgain) dgain += g * width;
  if (dshift) dshift += g * width;
  const float exact = c.rstd[index], rstd = round_scale(exact, c.scale_type);
  const float mean = kCentred ? c.mean[index] : 0.0f;
  // What the second pass takes from the first: the activation and its derivative of a gate before the norm; of one
  // after it, what is left of the gradient.
  float *activated = room, *slopes = room + width, *left = room;
  void* dgate = kGate != kUngated ? (char*)c.dgate + index * width * size_of(c.gate.type) : nullptr;

  auto load_grad = [&](int64_t j, int64_t n) ALWAYS {
    if (kGate != kUngated) return load_any(grad, c.grad.type, j, n);
    return load<G, kWide>((const typename G::T*)grad + j, n);
  };
  Vec along[2] = {}, level[2] = {};
  auto gather = [&](int64_t j, int64_t n, int which) ALWAYS {
    Vec normal = load<H, kWide>(row + j, n), d = load_grad(j, n), factor, slope;
    if (kGate != kUngated) factor = activate(load_any(gate, c.gate.type, j, n), c.activation, slope);
    if (kGate == kBefore) {
      normal *= factor;
      store<Float>(activated + j, factor, n);
      store<Float>(slopes + j, slope, n);
    }
    normal = kCentred ? (normal - mean) * rstd : normal * rstd;
    if (kGate == kAfter) {
      Vec product = d * normal;
      if (gain) product *= load<Float, kWide>(gain + j, n);
      store_any(dgate, c.gate.type, j, product * slope, n);
      d *= factor;
    }
    if (dgain) store<Float>(dgain + j, load<Float, kWide>(dgain + j, n) + d * normal, n);
    if (dshift) store<Float>(dshift + j, load<Float, kWide>(dshift + j, n) + d, n);
    if (gain) d *= load<Float, kWide>(gain + j, n);
    if (kGate == kAfter) store<Float>(left + j, d, n);
    along[which] += d * normal;
    if (kCentred) level[which] += d;
  };
  int64_t j = 0;
  for (; j + 2 * kWide <= width; j += 2 * kWide) {
    gather(j, kWide, 0);
    gather(j + kWide, kWide, 1);
  }
  if (j + kWide <= width) {
    gather(j, kWide, 0);
    j += kWide;
  }
  if (j < width) gather(j, width - j, 0);
  float slope = add_lanes(along[0] + along[1]) * (float)c.share;
  if (c.scale_type > 0) {
    const float passed = rstd > 0 ? exact / rstd : 0.0f;
    slope *= passed * passed * passed;
  }
  const float centre = kCentred ? add_lanes(level[0] + level[1]) / (float)width : 0.0f;

  each(width, [&](int64_t j, int64_t n) ALWAYS {
    const Vec in = load<H, kWide>(row + j, n);
    const Vec factor = kGate == kBefore ? load<Float, kWide>(activated + j, n) : Vec{};
    Vec normal = kGate == kBefore ? in * factor : in, d;
    normal = kCentred ? (normal - mean) * rstd : normal * rstd;
    if (kGate == kAfter) {
      d = load<Float, kWide>(left + j, n);
    } else {
      d = load_grad(j, n);
      if (gain) d *= load<Float, kWide>(gain + j, n);
    }
    if (kCentred) d -= centre;
    d = (d - normal * slope) * rstd;
    if (kGate == kBefore) {
      store_any(dgate, c.gate.type, j, in * d * load<Float, kWide>(slopes + j, n), n);
      d *= factor;
    }
    if (grad_sum) d += load_any(grad_sum, c.grad_sum.type, j, n);
    store<H>(drow + j, d, n);
  });
}

void add_to(float* total, const float* part, int64_t size) {
  for (int64_t j = 0; j < size; j++) total[j] += part[j];
}

template <class H, class G, bool kCentred, Gate kGate>
void backward_chunk(const void* call, int64_t chunk) {
  const Backward& c = *(const Backward*)call;
  const int64_t size = c.groups * c.width, sums = (c.dgain != nullptr) + (c.dshift != nullptr);
  const int64_t begin = chunk * c.rows_per_chunk;
  const int64_t end = begin + c.rows_per_chunk < c.rows ? begin + c.rows_per_chunk : c.rows;
  float* total = sums ? c.partial + chunk * sums * size : nullptr;
  float* run = total;
  if (sums) memset(total, 0, sums * size * sizeof(float));
  if (sums && end - begin > kRun) run = (float*)calloc(sums * size, sizeof(float));
  float* room = kGate != kUngated ? (float*)malloc(2 * c.width * sizeof(float)) : nullptr;
  float* dgain = c.dgain ? run : nullptr;
  float* dshift = c.dshift ? run + (sums - 1) * size : nullptr;
  for (int64_t r = begin; r < end; r++) {
    for (int64_t g = 0; g < c.groups; g++) backward_row<H, G, kCentred, kGate>(c, r, g, dgain, dshift, room);
    if (run != total && ((r - begin) % kRun == kRun - 1 || r + 1 == end)) {
      add_to(total, run, sums * size);
      memset(run, 0, sums * size * sizeof(float));
    }
  }
  if (run != total) free(run);
  free(room);
}

constexpr int64_t kColumns = 1024;

// Adds up what the chunks found, in their order, for some columns.
void backward_columns(const void* call, int64_t chunk) {
  const Backward& c = *(const Backward*)call;
  const int64_t size = c.groups * c.width, sums = (c.dgain != nullptr) + (c.dshift != nullptr);
  const int64_t chunks = (c.rows + c.rows_per_chunk - 1) / c.rows_per_chunk;
  const int64_t begin = chunk * kColumns, count = size - begin < kColumns ? size - begin : kColumns;
  for (int64_t which = 0; which < sums; which++) {
    float* out = (which == 0 && c.dgain ? c.dgain : c.dshift) + begin;
    memset(out, 0, count * sizeof(float));
    for (int64_t i = 0; i < chunks; i++) add_to(out, c.partial + (i * sums + which) * size + begin, count);
  }
}

template <class H, class G>
struct Differentiate { static constexpr Work work = backward_chunk<H, G, false, kUngated>; };
template <class H, class G>
struct DifferentiateCentred { static constexpr Work work = backward_chunk<H, G, true, kUngated>; };
template <class H>
struct DifferentiateGatedBefore { static constexpr Work work = backward_chunk<H, Float, false, kBefore>; };
template <class H>
struct DifferentiateGatedAfter { static constexpr Work work = backward_chunk<H, Float, false, kAfter>; };

}  // namespace

extern "C" __attribute__((visibility("default"))) void normswap_forward(const Forward* packed) {
  Forward c = *packed;
  const int64_t size = c.groups * c.width;
  float *gain, *shift;
  c.gain = widen_parameter(c.weight, c.offset, c.has_offset, size, &gain);
  c.shift = widen_parameter(c.bias, 0, false, size, &shift);
  Region region{};
  region.work = c.values            ? choose_types<NormaliseAndQuantize>(c.sum_type, c.out_type)
                : c.gated == kAfter ? choose_type<NormaliseAndGate>(c.sum_type)
                                    : choose_types<Normalise>(c.sum_type, c.out_type);
  region.call = &c;
  region.chunks = (c.rows + c.rows_per_chunk - 1) / c.rows_per_chunk;
  run_all(c.threads, region);
  free(gain);
  free(shift);
}

extern "C" __attribute__((visibility("default"))) void normswap_backward(const Backward* packed) {
  Backward c = *packed;
  const int64_t size = c.groups * c.width, sums = (c.dgain != nullptr) + (c.dshift != nullptr);
  float* gain;
  c.gain = widen_parameter(c.weight, c.offset, c.has_offset, size, &gain);
  Region region{};
  region.work = c.mean               ? choose_types<DifferentiateCentred>(c.row.type, c.grad.type)
                : c.gated == kBefore ? choose_type<DifferentiateGatedBefore>(c.row.type)
                : c.gated == kAfter  ? choose_type<DifferentiateGatedAfter>(c.row.type)
                                     : choose_types<Differentiate>(c.row.type, c.grad.type);
  region.call = &c;
  region.chunks = (c.rows + c.rows_per_chunk - 1) / c.rows_per_chunk;
  if (sums) {
    c.partial = (float*)malloc(region.chunks * sums * size * sizeof(float));
    region.finish = backward_columns;
    region.last_chunks = (size + kColumns - 1) / kColumns;
  }
  run_all(c.threads, region);
  free(c.partial);
  free(gain);
}

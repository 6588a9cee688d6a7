"""Convert a real model and compare the conversion with the original: what ``make demo`` runs.

    python tools/demo.py [--out demo-output] [--tokens 20] [--prompt TEXT] [--parity-tokens N]

Fetches SmolLM2-135M-Instruct, patches it in bfloat16 through the command line, generates with the original and with the
reloaded conversion, and times both. Exits with 1 when parity fails or the texts differ by more than a rounding tie.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from checkpoints import ROOT, FetchError, fetch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

import normswap

PREFILL = 512
ROUNDS = 7
# Turns after the one that warms up, and seconds after which they are enough.
FEWEST, ENOUGH = 1, 30


def main() -> int:
    """Tell the story; return the exit code."""
    parser = argparse.ArgumentParser(description="Convert SmolLM2-135M and compare it with the original.")
    parser.add_argument("--out", type=Path, default=ROOT / "demo-output")
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--prompt", default="The three states of matter are")
    parser.add_argument("--parity-tokens", type=int, help="how many tokens parity is measured on")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    print("Fetching SmolLM2-135M-Instruct (about a minute the first time)", flush=True)
    try:
        original_folder = fetch("smollm2")
    except FetchError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    converted_folder = arguments.out / "smollm2-135m-normswap"
    if code := _patch(original_folder, converted_folder, arguments.out / "parity.json", arguments.parity_tokens):
        return code

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    original = AutoModelForCausalLM.from_pretrained(original_folder, dtype=torch.bfloat16).to(device).eval()
    converted = normswap.load(converted_folder, dtype=torch.bfloat16, device=device)
    agree = _compare_texts(original, converted, original_folder, arguments.prompt, arguments.tokens)
    _compare_speed(original, converted)
    return 0 if agree else 1


def _patch(source: Path, out: Path, report: Path, tokens: int | None) -> int:
    program = Path(sys.executable).with_name("normswap")
    arguments = ["patch", _short(source), "-o", _short(out), "--dtype", "bfloat16", "--json", _short(report)]
    arguments.append("--overwrite")
    if tokens is not None:
        arguments += ["--tokens", str(tokens)]
    print(f"\n$ normswap {shlex.join(arguments)}", flush=True)
    return subprocess.run([program, *arguments]).returncode


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


@torch.inference_mode()
def _compare_texts(original: PreTrainedModel, converted: nn.Module, folder: Path, prompt: str, new_tokens: int) -> bool:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt").to(original.device)
    length = inputs["input_ids"].shape[1]
    sequences = [
        model.generate(**inputs, do_sample=False, min_new_tokens=new_tokens, max_new_tokens=new_tokens)[0]
        for model in (original, converted)
    ]
    print(f"\nGreedy, {new_tokens} tokens after {prompt!r}")
    for name, sequence in zip(("original", "converted"), sequences, strict=True):
        print(f"  {name + ':':<11}{tokenizer.decode(sequence[length:])!r}")
        print(f"             {sequence[length:].tolist()}")
    differing = (sequences[0] != sequences[1]).nonzero()
    if not len(differing):
        print(f"  identical: all {new_tokens} tokens agree")
        return True
    return _is_tie(original, folder, sequences, int(differing[0]), length)


def _is_tie(original: PreTrainedModel, folder: Path, sequences: list[Tensor], at: int, length: int) -> bool:
    """Say whether the original itself cannot tell the two first differing tokens apart in bfloat16.

    It cannot when float32 puts them closer together than the original's own rounding moves the two logits.
    """
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(original.device).eval()
    prefix, candidates = sequences[0][None, :at], [int(sequence[at]) for sequence in sequences]
    true_logits = exact(prefix).logits[0, -1, candidates]
    served_logits = original(prefix).logits[0, -1, candidates].float()
    margin = (true_logits[0] - true_logits[1]).abs().item()
    rounding = (served_logits - true_logits).abs().sum().item()
    tie = margin <= rounding
    print(f"  first difference: token {at - length}, {candidates[0]} against {candidates[1]}")
    print(f"  their logits in float32 lie {margin:.4f} apart; bfloat16 moves the original's by {rounding:.4f}")
    print(f"  {'a tie: rounding decides it' if tie else 'NOT a tie: the conversion disagrees'}")
    return tie


@torch.inference_mode()
def _compare_speed(original: PreTrainedModel, converted: nn.Module) -> None:
    device = original.device
    names = [decision.name for decision in normswap.inspect(original).plan.swaps]
    width = original.config.hidden_size
    hidden = torch.randn(1, PREFILL, width, dtype=original.dtype, device=device)
    ids = torch.randint(original.config.vocab_size, (1, PREFILL), device=device)

    def all_norms(model: nn.Module) -> Callable[[], object]:
        norms = [model.get_submodule(name) for name in names]
        return lambda: [norm(hidden) for norm in norms]

    def prefill(model: nn.Module) -> Callable[[], object]:
        return lambda: model(ids, logits_to_keep=1)

    print(f"\nSpeed, {original.dtype} on {_hardware(device)}: medians, the two taking turns")
    norm_seconds = _medians([all_norms(original), all_norms(converted)], device)
    model_seconds = _medians([prefill(original), prefill(converted)], device)
    title = f"{len(names)} norm forwards, {PREFILL} x {width}"
    before, after = (seconds * 1e3 for seconds in norm_seconds)
    print(f"  {title:<32}{before:9.1f} ms    -> {after:9.1f} ms      {before / after:.2f}x")
    before, after = (PREFILL / seconds for seconds in model_seconds)
    print(f"  {f'prefill of {PREFILL} tokens':<32}{before:9.0f} tok/s -> {after:9.0f} tok/s   {after / before:.2f}x")


def _medians(runs: list[Callable[[], object]], device: torch.device) -> list[float]:
    taken: list[list[float]] = [[] for _ in runs]
    begin = time.perf_counter()
    for turn in range(ROUNDS + 1):
        # Where bfloat16 is slow, as on a core that has no arithmetic for it, one or two turns have to do.
        if turn > FEWEST and time.perf_counter() - begin > ENOUGH:
            break
        for run, times in zip(runs, taken, strict=True):
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            # The first turn warms up.
            if turn:
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    sys.exit(main())

"""Reports as a verification gives them, without running one: a pass, a fail, a doubt, the least and the most."""

from __future__ import annotations

import math
from dataclasses import replace

from normswap.evidence import (
    Divergence,
    Fault,
    Generation,
    LayerFigures,
    PairFigures,
    Power,
    SettingChange,
    TensorChange,
    TensorFigures,
)
from normswap.figures import Control, Criterion, Exact, LostGain, NormFigures, ParityReport, Served

__all__ = ["EXAMPLES", "HOSTILE", "big", "failing", "hostile", "inconclusive", "minimal", "passing", "stacks"]

# Markup, a terminal's escape, a table's and a code span's ends, and the end of a comment.
HOSTILE = '<script>alert(\'1\')</script>"x" onload="y" | ` \x1b[31m --> &amp; \u202e'

_KINDS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "mlp.norm")


def _norm(name: str, units: float = 1.0, *, passed: bool = True) -> NormFigures:
    other = 40 if units else 0
    bins = [0.0, 1.0, 2.0, 4.0, 8.0, 16.0]
    place = next((at for at, top in enumerate(bins) if units <= top), 6)
    histogram = [2048 * 576 - other, 0, 0, 0, 0, 0, 0]
    histogram[place] += other
    return NormFigures(
        name=name,
        calls=8,
        elements=2048 * 576,
        dtype="bfloat16",
        max_ulp=units,
        mean_ulp=units * other / (2048 * 576),
        bound_ulp=1.0,
        bit_identical_fraction=1 - other / (2048 * 576),
        bound_identical=0.9999,
        error_original=1.66e-3,
        error_swapped=1.66e-3,
        exact_ulp_original=0.501,
        exact_ulp_swapped=0.5 + units / 1000,
        passed=passed,
        histogram=histogram,
        worst_call=3 if units else None,
        worst_row=117 if units else None,
        worst_channel=44 if units else None,
    )


def _layers(count: int, *, departs: int | None = None, stack: str = "model.layers") -> list[LayerFigures]:
    found = []
    for index in range(count):
        own = 2e-3 * (1 + index / 6)
        gone = departs is not None and index >= departs
        ratio = 1.9 if gone else 1 + 0.02 * math.sin(index)
        found.append(
            LayerFigures(
                name=f"{stack}.{index}",
                stack=stack,
                index=index,
                error_exact=3e-2 if gone else 2e-7 * (1 + index / 3),
                error_original=own,
                error_converted=own * ratio,
                ratio=ratio,
                ratio_interval=(ratio - 0.02, ratio + 0.02),
                departs=gone,
            )
        )
    return found


def _faults(norm: str, *, seen: bool = True) -> list[Fault]:
    return [
        Fault("gain dropped", norm, "exact", 0.31, 1e-5, True),
        Fault("eps x 10", norm, "exact", 4.2e-4, 1e-5, True),
        Fault("1+w flipped", None, None, None, None, None, "no norm of this model adds one to its gain"),
        Fault("cast order swapped", norm, "norms" if seen else None, 1.5 if seen else 1.0, 1.0, seen),
        Fault("gain scaled", norm, "exact", 6.1e-3, 1e-5, True),
    ]


def passing() -> ParityReport:
    """A fold of 60 gains, kept by every gate."""
    norms = [_norm(f"model.layers.{index}.{kind}") for index in range(30) for kind in _KINDS[:2]]
    norms.append(_norm("model.norm", 0.0))
    folded = norms[:60]
    return ParityReport(
        failures=[],
        notes=["the tokenizer has no padding token; its end token stands in for it"],
        device="cpu",
        device_name="x86-64, 2 threads",
        backend="cpu",
        dtype="bfloat16",
        reference_dtype="float32",
        inputs={
            "kind": "text",
            "sequences": 8,
            "length": 256,
            "description": "8 sequences of 256 tokens of the built-in prompts (several scripts, code, numbers)",
        },
        criterion=Criterion(),
        output={"name": "logits", "shape": [1, 256, 49152], "others": []},
        exact=Exact(3.1e-7, 1e-5, Control("model.layers.3.input_layernorm", 1.02, 5.2e-3, True)),
        logits=Served(
            error_original=1.21e-2,
            error_converted=1.22e-2,
            ratio=1.004,
            ratio_interval=(0.981, 1.026),
            kl_original=2.31e-4,
            kl_converted=2.33e-4,
            top1_agreement=0.9907,
            top1_agreement_original=0.9912,
            max_abs=0.31,
            tokens=2048,
            control=LostGain("model.layers.7.post_attention_layernorm", 28.4, True),
            ratio_interval_tokens=(0.992, 1.015),
            kl_ratio=1.0043,
            kl_ratio_interval=(0.978, 1.031),
            kl_interval=(2.11e-4, 2.58e-4),
            kl_original_interval=(2.09e-4, 2.55e-4),
            top1_interval=(0.9861, 0.9946),
            top1_original_interval=(0.9868, 0.9951),
        ),
        norms=norms,
        versions={"normswap": "0.1.0", "python": "3.11.9", "torch": "2.13.0", "transformers": "5.24.0"},
        checkpoint="./smollm2-folded",
        against="smollm2-135m-instruct",
        command="normswap verify ./smollm2-folded --against smollm2-135m-instruct --dtype bfloat16",
        tensors=TensorFigures(
            "60 gains folded into 210 linears",
            "folded",
            tensors=272,
            same=2,
            changes=[
                TensorChange(
                    f"model.layers.{index}.self_attn.{kind}_proj.weight",
                    "folded",
                    True,
                    f"the gain of model.layers.{index}.input_layernorm",
                    "model.safetensors",
                    1.1e-3,
                )
                for index in range(30)
                for kind in "qkv"
            ],
            files="2 files where the original has 1",
        ),
        pairs=[PairFigures(norm.name, [f"{norm.name}.reader"] * 2, 1.2e-3, 2.3e-3, True) for norm in folded],
        layers=_layers(30),
        power=Power(_faults("model.layers.3.input_layernorm"), 3.2e-5, "model.layers.3.input_layernorm"),
        generation=Generation(
            32, 4, 3, [Divergence(2, 17, 284, 260, (" the", " a"), 1.1e-3, 7.8e-3, True)]
        ),
    )  # fmt: skip


def failing() -> ParityReport:
    """Two layers' norms swapped, found on the disk, by each gate and in the residual stream."""
    good = passing()
    norms = list(good.norms)
    norms[8] = replace(_norm(norms[8].name, 24.0, passed=False), bit_identical_fraction=0.12)
    norms[9] = _norm(norms[9].name, math.nan, passed=False)
    assert good.tensors is not None
    return replace(
        good,
        failures=[
            "tensors: 2 tensors changed and nothing explains it: model.layers.4.input_layernorm.weight (largest "
            "difference 0.41 at channel 44), model.layers.5.input_layernorm.weight",
            "exact: error 0.0304 above 1e-05; the first layer that departs is model.layers.4",
            "norms: model.layers.4.input_layernorm: 24 units in the last place off, above 1",
            "norms: model.layers.4.post_attention_layernorm: NaN or inf at 3 places where the original has another "
            "value",
            "served: error, converted / original, 2.31 above 1.25",
            "served: 95% interval of error, converted / original, 2.2 to 2.4 lies above 1.05",
            "folds: model.layers.4.input_layernorm: error 0.33 above 0.0023",
            "generation: prompt 1 parts after 2 tokens: ' a' in place of ' the', which the reference prefers by 1.4",
        ],
        exact=replace(good.exact, error=3.04e-2),
        logits=replace(
            good.logits, error_converted=2.8e-2, ratio=2.31, ratio_interval=(2.2, 2.4), kl_converted=1.3e-3,
            kl_ratio=2.37, kl_ratio_interval=(2.2, 2.6), top1_agreement=0.961,
        ),
        norms=norms,
        tensors=replace(
            good.tensors,
            summary="60 gains folded into 210 linears, unknown change in 2 tensors",
            kind="folded+unknown",
            changes=[
                TensorChange("model.layers.4.input_layernorm.weight", "changed", False,
                             "largest difference 0.41 at channel 44", "model.safetensors", 0.33),
                TensorChange("model.layers.5.input_layernorm.weight", "changed", False,
                             "largest difference 0.38 at channel 44", "model.safetensors", 0.31),
                TensorChange("lm_head.bias", "missing", False, "float32 of shape [49152]"),
                *good.tensors.changes,
            ],
            settings=[SettingChange("rms_norm_eps", 1e-5, 1e-6), SettingChange("tie_word_embeddings", None, False)],
            altered=["model.safetensors"],
        ),
        pairs=[replace(good.pairs[0], error=0.33, passed=False), *good.pairs[1:]],
        layers=_layers(30, departs=4),
        departs="model.layers.4",
        generation=Generation(32, 4, 0, [
            Divergence(prompt, 2 + prompt, 284, 260, None if prompt else (" the", " a"), 1.4, 7.8e-3, False)
            for prompt in range(4)
        ]),
    )  # fmt: skip


def inconclusive() -> ParityReport:
    """Nothing failed, and one fault would not have been seen; too few sequences besides."""
    good = passing()
    faults = _faults("model.layers.3.input_layernorm", seen=False)
    return replace(
        good,
        doubts=[
            "power: with the cast order swapped in model.layers.3.input_layernorm every gate holds (norms: 1 unit, "
            "bound 1): the verdict cannot tell that fault; verify with more tokens (--tokens 4096)",
            "served: the interval of the ratio rests on 3 sequences, 8 are wanted; give a longer --text",
        ],
        inputs={**good.inputs, "sequences": 3, "description": "3 sequences of 256 tokens of notes.txt"},
        power=replace(good.power, faults=faults),
    )


def minimal() -> ParityReport:
    """A float32 original without a reference: every figure that may be absent is."""
    return ParityReport(
        failures=[],
        notes=[],
        device="cpu",
        device_name="",
        backend="cpu",
        dtype="float32",
        reference_dtype="float32",
        inputs={"kind": "ids", "sequences": 1, "length": 16, "description": "1 sequence of 16 seeded token ids"},
        criterion=Criterion(),
        output={"name": "last_hidden_state", "shape": [1, 16, 64], "others": ["pooler_output"]},
        exact=Exact(math.nan, 1e-5, None),
        logits=Served(),
        norms=[],
    )


def big() -> ParityReport:
    """94 layers, five norms in each and one more, generation, controls, and every tensor changed."""
    good = passing()
    norms = [
        _norm(f"model.layers.{layer}.{kind}", float((layer * 7 + at) % 3 == 0), passed=True)
        for layer in range(94)
        for at, kind in enumerate(_KINDS)
    ]
    norms[200] = _norm(norms[200].name, 6.0, passed=False)
    norms[201] = replace(norms[201], calls=0, elements=0, max_ulp=None, passed=None, histogram=[])
    norms.append(_norm("model.norm"))
    assert len(norms) == 94 * 5 + 1 and good.tensors is not None
    changes = [
        TensorChange(
            f"model.layers.{layer}.mlp.experts.{expert}.gate_up_proj.weight",
            "folded",
            True,
            f"the gain of model.layers.{layer}.post_attention_layernorm",
            f"model-{layer:05}-of-00094.safetensors",
            1.1e-3,
        )
        for layer in range(94)
        for expert in range(20)
    ]
    return replace(
        good,
        failures=["norms: model.layers.40.input_layernorm: 6 units in the last place off, above 1"],
        norms=norms,
        tensors=replace(good.tensors, summary="188 gains folded into 1880 linears", tensors=2300, changes=changes),
        pairs=[
            PairFigures(f"model.layers.{layer}.{kind}", ["a.weight", "b.weight", "c.weight"], 1.2e-3, 2.3e-3, True)
            for layer in range(94)
            for kind in _KINDS[:2]
        ],
        layers=[*_layers(94)[:60], *_layers(94, departs=60)[60:]],
        departs="model.layers.60",
        generation=Generation(
            64, 60, 0, [Divergence(at, at, at, at + 1, (" one", " two"), 2e-3, 7.8e-3, True) for at in range(60)]
        ),
        streamed=True,
        processes=4,
    )


def stacks() -> ParityReport:
    """An encoder and a decoder, errors of zero and one that is no number, a norm more than 99 units off."""
    good = passing()
    parts = ("model.encoder", "model.decoder")
    layers = [*_layers(12, stack="model.encoder.layers"), *_layers(12, departs=8, stack="model.decoder.layers")]
    layers[3] = replace(layers[3], error_exact=0.0, error_converted=math.nan, departs=True)
    norms = [
        _norm(f"{part}.layers.{index}.{kind}", index % 5 / 2, passed=index % 5 < 3)
        for part in parts
        for index in range(12)
        for kind in ("self_attn_layer_norm", "final_layer_norm")
    ]
    norms += [_norm(f"{parts[0]}.layer_norm"), _norm(f"{parts[1]}.layer_norm", 150.0, passed=False)]
    return replace(
        good,
        failures=[
            "exact: error 0.03 above 1e-05",
            "norms: model.decoder.layer_norm: 150 units in the last place off, above 1",
        ],
        exact=replace(good.exact, error=0.03, dtype="float64", error_original=2e-5),
        norms=norms,
        layers=layers,
        departs="model.encoder.layers.3",
        tensors=None,
        pairs=[],
    )


def hostile() -> ParityReport:
    """Names and texts that are written to break what they are put into."""
    bad = failing()
    assert bad.tensors is not None and bad.generation is not None
    return replace(
        bad,
        failures=[f"norms: {HOSTILE}: 9 units in the last place off, above 1", *bad.failures],
        doubts=[HOSTILE],
        notes=[HOSTILE],
        device=HOSTILE,
        device_name=HOSTILE,
        backend=HOSTILE,
        dtype=HOSTILE,
        inputs={**bad.inputs, "description": HOSTILE, "kind": HOSTILE},
        output={"name": HOSTILE, "shape": [1], "others": [HOSTILE]},
        norms=[_norm(f"model.layers.0.{HOSTILE}", 3.0, passed=False), _norm(HOSTILE), *bad.norms],
        versions={HOSTILE: HOSTILE},
        checkpoint=HOSTILE,
        against=HOSTILE,
        command=f"normswap verify '{HOSTILE}'",
        tensors=replace(
            bad.tensors,
            summary=HOSTILE,
            changes=[TensorChange(HOSTILE, "changed", False, HOSTILE, HOSTILE, 1.0)],
            settings=[SettingChange(HOSTILE, HOSTILE, [HOSTILE])],
            files=HOSTILE,
            altered=[HOSTILE],
        ),
        pairs=[PairFigures(HOSTILE, [HOSTILE], 1.0, 0.1, False)],
        layers=[replace(bad.layers[0], name=HOSTILE, stack=HOSTILE, departs=True)],
        departs=HOSTILE,
        power=Power([Fault(HOSTILE, HOSTILE, HOSTILE, 1.0, 1.0, False, HOSTILE)], 0.1, HOSTILE),
        generation=replace(bad.generation, divergences=[Divergence(0, 1, 2, 3, (HOSTILE, HOSTILE), 1.0, 0.1, False)]),
    )


EXAMPLES = {
    "pass": passing,
    "fail": failing,
    "inconclusive": inconclusive,
    "minimal": minimal,
    "big": big,
    "stacks": stacks,
    "hostile": hostile,
}

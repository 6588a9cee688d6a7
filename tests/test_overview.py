"""What `inspect` prints: read as a person would, who has never seen the model."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from normswap.inline import CodeNorm
from normswap.naming import name_pattern, spelled_patterns, towers
from normswap.overview import render_plan, spec_words
from normswap.plan import Decision, Plan, make_plan
from normswap.spec import NormSpec

pytestmark = pytest.mark.core

WIDE = NormSpec("rms", 576, 1e-5, cast="before_gain")


def swap(name: str, cls: str = "LlamaRMSNorm", spec: NormSpec = WIDE) -> Decision:
    return Decision(name, cls, "swap", "", spec)


def refusal(name: str, cls: str, reason: str, *, of_rows: bool = True) -> Decision:
    return Decision(name, cls, "refuse", reason, None, of_rows=of_rows)


def lines_of(*decisions: Decision, functions: tuple[CodeNorm, ...] = ()) -> list[str]:
    return render_plan(Plan(decisions, functions)).splitlines()


def test_one_stack_of_layers_is_a_table_under_what_it_computes() -> None:
    assert lines_of(
        *(swap(f"model.layers.{at}.input_layernorm") for at in range(30)), swap("model.norm", "RMSNorm")
    ) == [
        "  pattern                         class         count  action",
        "RMS, width 576, eps 1e-05, gain w, cast before gain",
        "  model.layers.*.input_layernorm  LlamaRMSNorm     30  swap",
        "  model.norm                      RMSNorm           1  swap",
        "",
        "31 norms: 31 to swap",
    ]
    assert lines_of() == ["no norm found"]
    assert "  (the model)  LayerNorm      1  swap" in lines_of(swap("", "LayerNorm"))


def test_parts_with_layers_of_their_own_have_headings_and_subtotals() -> None:
    lines = lines_of(
        *(swap(f"model.vision.blocks.{at}.norm{half}") for at in range(3) for half in (1, 2)),
        refusal("model.vision.merger.ln_q", "Odd", "its rows are not independent of each other"),
        *(swap(f"model.text.layers.{at}.mlp.experts.{expert}.norm") for at in range(3) for expert in range(8)),
        swap("model.text.norm"),
        swap("projector.norm"),
    )
    assert [line for line in lines if re.match(r"\S.*: ", line)] == [
        "model.vision: 7 norms, 6 to swap",
        "model.text: 25 norms, all to swap",
        "elsewhere: 1 norm, all to swap",
        "33 norms: 32 to swap, 1 to refuse",
    ]
    text = lines[lines.index("model.text: 25 norms, all to swap") :]
    assert text[2].split() == ["layers.*.mlp.experts.*.norm", "LlamaRMSNorm", "24", "swap"]
    assert text[3].split() == ["norm", "LlamaRMSNorm", "1", "swap"]


def test_refusals_stand_under_their_reason_and_what_has_no_rows_comes_last() -> None:
    reason = "its rows are not independent of each other"
    other = "BatchNorm2d normalises over the batch or over positions, not over the last dimension"
    lines = lines_of(
        refusal("stem.bn", "BatchNorm2d", other, of_rows=False),
        *(refusal(f"layers.{at}.bn", "BatchNorm2d", other, of_rows=False) for at in range(4000)),
        refusal("layers.0.norm", "SequenceNorm", reason),
        refusal("head.norm", "OtherNorm", reason),
        swap("norm"),
        functions=(CodeNorm("layers.*.mixer", "Mixer", "l2norm", "L2", "not a module: l2norm() in Mixer.forward", 40),),
    )
    at = lines.index("refused, by reason")
    assert [" ".join(line.split()) for line in lines[at + 1 :]] == [
        reason,
        "layers.*.norm SequenceNorm 1 refuse",
        "head.norm OtherNorm 1 refuse",
        "",
        "no norms of rows, left alone",
        other,
        "stem.bn BatchNorm2d 1 refuse",
        "layers.*.bn BatchNorm2d 4,000 refuse",
        "",
        "norms that are code, nothing to swap",
        "L2, not a module: l2norm() in Mixer.forward",
        "layers.*.mixer Mixer 40 -",
        "",
        "3 norms: 1 to swap, 2 to refuse",
        "4,001 modules besides that are no norms of rows",
        "40 places where norms are code, not modules",
    ]


def test_columns_are_aligned_and_the_class_gives_way_where_a_line_would_be_long() -> None:
    long = "a" * 50
    lines = lines_of(swap(f"{long}.norm", "OneVeryLongClassNameThatNobodyCouldEverTypeByHandRMSNorm"), swap("norm"))
    rows = [line for line in lines if "swap" in line and ":" not in line]
    assert all(len(line) <= 100 for line in lines)
    assert rows[0].index(" swap") == rows[1].index(" swap") and f"{long}.norm" in rows[0] and "…" in rows[0]
    reason = "it is refused for many words, " * 12
    assert all(len(line) <= 100 for line in lines_of(refusal("norm", "Odd", reason)))


def test_norms_that_differ_in_width_only_are_one_row() -> None:
    specs = [NormSpec("layer", width, 1e-5, bias=True, bias_name="bias") for width in (96, 192, 384)]
    lines = lines_of(*(swap(f"stages.{at}.norm", "LayerNorm", spec) for at, spec in enumerate(specs)))
    assert lines[1:3] == [
        "LayerNorm, widths 96 to 384, eps 1e-05, gain w + bias, cast after gain",
        "  stages.*.norm  LayerNorm      3  swap",
    ]


def test_layers_of_another_kind_are_named_by_their_numbers() -> None:
    bare = NormSpec("rms", None, 1e-6, gain="none", gain_name=None)
    decisions = [swap(f"layers.{at}.norm", spec=bare if at == 1 else WIDE) for at in range(94)]
    assert [row["pattern"] for row in Plan(tuple(decisions)).rows()] == ["layers.{0,2-93}.norm", "layers.1.norm"]
    assert lines_of(*decisions)[2].split() == ["layers.{0,2-93}.norm", "LlamaRMSNorm", "93", "swap"]


def test_names_and_numbers() -> None:
    assert name_pattern("0.layers.12.mlp2.3") == "*.layers.*.mlp2.*"
    both = [[f"h.{at}.{half}.n" for at in range(0, 40, 2) for half in (0, 1)], ["h.1.0.n", "h.1.1.n"]]
    assert spelled_patterns(both) == ["h.{0,2,4,…,38}.*.n", "h.1.*.n"]
    assert spelled_patterns([["a.7.b", "a.8.b"]]) == ["a.*.b"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["model.layers.*.norm", "model.norm"], [""]),
        (["norm"], [""]),
        ([], [""]),
        (["*.norm"], [""]),
        (["encoder.layer.*.a", "decoder.layer.*.a", "norm"], ["encoder", "decoder"]),
        (["m.vision.deep.layers.*.n", "m.vision.post", "m.text.layers.*.n"], ["m.vision", "m.text"]),
        (["t.visual.blocks.*.n", "t.visual.merger.*.n", "t.model.layers.*.n", "c.layers.*.n"],
         ["t.visual", "t.model", "c"]),
        (["visual.blocks.*.n", "visual.side.list.*.n", "text.layers.*.n"], ["visual", "text"]),
    ],
)  # fmt: skip
def test_towers(patterns: list[str], expected: list[str]) -> None:
    assert towers(patterns) == expected


def words(kind: Any = "rms", width: int | None = 64, eps: float = 1e-6, **settings: Any) -> str:
    return spec_words(NormSpec(kind, width, eps, **settings).to_dict())


def test_spec_words() -> None:
    layer = words("layer", 384, 1e-12, bias=True, bias_name="bias")
    assert layer == "LayerNorm, width 384, eps 1e-12, gain w + bias, cast after gain"
    assert words(width=None, eps=0.0, gain="none", gain_name=None) == "RMS, any width, eps 0, no gain"
    gated = words(gate="silu", gate_position="before", groups=4)
    assert gated == "RMS, width 64, 4 groups a row, eps 1e-06, gain w, cast after gain, SiLU gate before the norm"
    heads = words(heads=8, cast="before_gain")
    assert heads == "RMS, width 64, 8 heads with gains of their own, eps 1e-06, gain w, cast before gain"
    assert words(reduction="sum", gain="none", eps_position="clamp") == "L2, width 64, eps 1e-06 at least, no gain"
    assert "eps 1e-06 outside the root, gain 1+w before the norm" in words(
        gain="1+w", gain_position="before", eps_position="outside"
    )
    assert "over channels" in words(axis="channels")
    assert words(then=("dropout", "act")).endswith("cast after gain, then dropout, act")
    assert "statistics of the first 16 columns" in words(partial=16)
    assert words(own_code=("bfloat16", "float16")).endswith("its own code for bfloat16 and float16")


def omni_thinker() -> nn.Module:
    """A mixture of experts of 94 layers with a vision and an audio tower, on the meta device."""
    if not hasattr(transformers, "Qwen3OmniMoeThinkerConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Qwen3-Omni")
    config = transformers.Qwen3OmniMoeThinkerConfig()
    text = config.text_config
    text.num_hidden_layers, text.num_experts, text.head_dim, text.hidden_size = 94, 128, 128, 4096
    if transformers.__version__ < "5":
        text.rope_scaling = {"rope_type": "default", "mrope_section": [24, 20, 20]}
    with torch.device("meta"):
        return transformers.Qwen3OmniMoeThinkerForConditionalGeneration._from_config(config)


def test_a_deep_mixture_of_experts_with_towers_fits_a_page() -> None:
    plan = make_plan(omni_thinker())
    text = render_plan(plan)
    lines = text.splitlines()
    assert len(plan.decisions) > 480 and len(lines) <= 32 and all(len(line) <= 100 for line in lines)
    headings = [match.groups() for line in lines if (match := re.match(r"(\S+): (\d+) norms, all to swap$", line))]
    assert [name.split(".")[-1] for name, _ in headings] == ["audio_tower", "visual", headings[-1][0].split(".")[-1]]
    assert [int(count) for _, count in headings] == [65, 58, 377]
    assert re.search(r"^    layers\.\*\.input_layernorm +Qwen3Omni\S+ +94  swap$", text, re.MULTILINE)
    at = lines.index("  RMS, width 128, eps 1e-06, gain w, cast before gain")
    assert [line.split()[0] for line in lines[at + 1 : at + 3]] == [f"layers.*.self_attn.{x}_norm" for x in "qk"]
    assert lines[-1] == "500 norms: 500 to swap"

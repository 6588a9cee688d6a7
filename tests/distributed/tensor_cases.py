"""Tensor and sequence parallelism: norms that get DTensors, or results that are still on their way."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from rank_cases import Case, check_close, check_fused_step, counting, layers_of, norms_of, tiny, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

import normswap
from normswap import distributed, modules

NORMS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaRMSNorm(8),
    "gemma2": lambda: Gemma2RMSNorm(8),
    "layer": lambda: nn.LayerNorm(8),
    "rms": lambda: nn.RMSNorm(8, eps=1e-6),
    "no-gain": lambda: nn.LayerNorm(8, elementwise_affine=False),
}
PLACEMENTS = {"first": Shard(0), "sequence": Shard(1), "replica": Replicate()}


def norm_of(kind: str) -> nn.Module:
    """One norm with disturbed parameters, alike on every rank."""
    torch.manual_seed(0)
    norm = NORMS[kind]()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return norm


@functools.cache
def swapped(kind: str) -> nn.Module:
    return normswap.patch(norm_of(kind))


def swapped_norm_of(kind: str) -> nn.Module:
    """The same, swapped."""
    return copy.deepcopy(swapped(kind))


def replicate(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for name, parameter in list(module.named_parameters()):
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
    return module


def gradients_alone(norm: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    x = x.clone().requires_grad_()
    y = norm(x)
    y.backward(grad)
    return y.detach(), x.grad, {name: parameter.grad for name, parameter in norm.named_parameters()}


def check_norm(norm: nn.Module, kind: str, x: Tensor, given: DTensor, originals: int) -> DTensor:
    """Hold a norm that gets a DTensor to the plain one on the whole tensor: result and every gradient."""
    expected, x_grad, parameter_grads = gradients_alone(norm_of(kind), x, grad := torch.rand_like(x))
    given = given.detach().requires_grad_()
    with counting() as calls:
        y = norm(given)
    assert len(calls) == originals
    check_close(y.full_tensor(), expected, "result")
    # The gradient comes from elsewhere in another placement than the result's.
    y.backward(distribute_tensor(grad, given.device_mesh, [Replicate()] * given.device_mesh.ndim))
    check_close(given.grad.full_tensor(), x_grad, "gradient of the input")
    for name, parameter in norm.named_parameters():
        check_close(whole(parameter.grad), parameter_grads[name], f"gradient of {name}")
    return y


def whole_rows(mesh: DeviceMesh, kind: str, placed: str) -> None:
    """Rows that are whole on each rank run there; a rank may have fewer of them, or none."""
    for rows in (4, 3, 1):
        x = torch.randn(rows, rows, 8)
        norm = replicate(swapped_norm_of(kind), mesh)
        y = check_norm(norm, kind, x, distribute_tensor(x, mesh, [PLACEMENTS[placed]]), originals=0)
        assert y.placements == (PLACEMENTS[placed],)


def split_rows(mesh: DeviceMesh, kind: str) -> None:
    """Rows that are divided between ranks go to the original, which torch can run for most classes."""
    x = torch.randn(3, 5, 8)
    given = distribute_tensor(x, mesh, [Shard(2)])
    norm = replicate(swapped_norm_of(kind), mesh)
    try:
        replicate(norm_of(kind), mesh)(given)
    except RuntimeError as refused:
        try:
            norm(given)
        except RuntimeError as error:
            assert str(error) == str(refused)
            return
        raise AssertionError("ran what the original does not run") from refused
    check_norm(norm, kind, x, given, originals=1)


def pending_sums(mesh: DeviceMesh, kind: str) -> None:
    """Rows that are still to be summed over ranks go to the original."""
    x = torch.randn(3, 5, 8)
    norm = replicate(swapped_norm_of(kind), mesh)
    part = x * (0.25 if dist.get_rank() else 0.75)
    given = DTensor.from_local(part, mesh, [Partial()], run_check=False).detach().requires_grad_()
    with counting() as calls:
        y = norm(given)
    assert len(calls) == 1
    check_close(y.full_tensor(), norm_of(kind)(x).detach(), "result")


def no_mixture(mesh: DeviceMesh) -> None:
    """A plain row beside a distributed gain is an error in torch's words, as it is for the original."""
    norm = replicate(swapped_norm_of("llama"), mesh)
    try:
        norm(torch.randn(3, 8))
    except RuntimeError as error:
        assert "mixed torch.Tensor and DTensor" in str(error)
    else:
        raise AssertionError("a mixture of plain and distributed tensors ran")


def strided_rows(mesh: DeviceMesh) -> None:
    """A transposed input, whose result lies in memory as the kernel pleases."""
    x = torch.randn(4, 6, 8).transpose(0, 1)
    given = distribute_tensor(x.transpose(0, 1).contiguous(), mesh, [Shard(1)]).transpose(0, 1)
    assert given.placements == (Shard(0),) and not given.is_contiguous()
    y = check_norm(replicate(swapped_norm_of("llama"), mesh), "llama", x, given, originals=0)
    assert not y.is_contiguous() and not y.to_local().is_contiguous()


def two_dimensions(_: DeviceMesh) -> None:
    """A mesh of two dimensions, the rows divided along one or the other."""
    for shape in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
        for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(1), Replicate()]):
            x = torch.randn(4, 6, 8)
            norm = swapped_norm_of("llama")
            norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Replicate(), Replicate()]))
            y = check_norm(norm, "llama", x, distribute_tensor(x, mesh, placements), originals=0)
            assert y.placements == tuple(placements)


def compiled(mesh: DeviceMesh) -> None:
    """The compiler sees one graph."""
    norm = replicate(swapped_norm_of("llama"), mesh)
    x = torch.randn(3, 6, 8)
    y = torch.compile(norm, fullgraph=True, backend="aot_eager")(distribute_tensor(x, mesh, [Shard(1)]))
    assert y.placements == (Shard(1),)
    check_close(y.full_tensor().detach(), norm_of("llama")(x).detach(), "result")


def on_its_way(mesh: DeviceMesh) -> None:
    """A plain input that a collective has not delivered yet, as a row-parallel linear hands it on."""
    x = torch.randn(4, 6, 8)
    for records in (True, False):
        with torch.set_grad_enabled(records):
            norm = swapped_norm_of("gemma2")
            given = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_(records)
            late = given.redistribute(placements=[Replicate()], async_op=True).to_local()
            assert type(late) is not Tensor
            check_close(norm(late).detach(), norm_of("gemma2")(x).detach(), "result")


def heads(mesh: DeviceMesh, placed: str) -> None:
    """Gains of heads beside heads: divided among the ranks together, or gone to the original."""
    torch.manual_seed(0)
    x, gain, bias, gate = torch.randn(3, 4, 8), torch.randn(4, 8), torch.randn(4, 8), torch.randn(3, 4, 8)
    placements = {"heads": (Shard(1), Shard(0)), "rows": (Shard(0), Replicate()), "apart": (Shard(1), Replicate())}
    of_x, of_gain = placements[placed]
    seen = []

    def local(x: Tensor, gate: Tensor | None, gain: Tensor | None, bias: Tensor | None) -> Tensor:
        seen.append("local")
        return nn.functional.normalize(x, dim=-1) * gain * gate + bias

    plain = [tensor.clone().requires_grad_() for tensor in (x, gate, gain, bias)]
    given = [
        distribute_tensor(tensor, mesh, [placement]).requires_grad_()
        for tensor, placement in zip((x, gate, gain, bias), (of_x, of_x, of_gain, of_gain), strict=True)
    ]
    expected = local(*plain)
    y = distributed.run(local, *given, lambda: local(*given))
    assert len(seen) == 2
    check_close(y.full_tensor().detach(), expected.detach(), "result")
    grad = torch.randn_like(x)
    expected.backward(grad)
    y.backward(distribute_tensor(grad, mesh, [Replicate()]))
    for tensor, same in zip(given, plain, strict=True):
        check_close(tensor.grad.full_tensor(), same.grad, "gradient")


def gated(mesh: DeviceMesh, of_gate: str) -> None:
    """A gate that lies where its rows lie is fused with them; another one goes to the original."""
    x, gate, grad = torch.randn(4, 6, 8), torch.randn(4, 6, 8), torch.rand(4, 6, 8)
    plain = [tensor.clone().requires_grad_() for tensor in (x, gate)]
    alone = Qwen3NextRMSNormGated(8)
    with torch.no_grad():
        alone.weight.add_(0.3 * torch.randn(8))
    norm = replicate(normswap.patch(copy.deepcopy(alone)), mesh)
    expected = alone(*plain)
    expected.backward(grad)
    placements = (Shard(1), Shard(1) if of_gate == "beside" else Replicate())
    given = [
        distribute_tensor(t, mesh, [where]).requires_grad_() for t, where in zip((x, gate), placements, strict=True)
    ]
    with counting() as calls:
        y = norm(*given)
    assert len(calls) == (0 if of_gate == "beside" else 1)
    check_close(y.full_tensor().detach(), expected.detach(), "result")
    y.backward(distribute_tensor(grad, mesh, [Replicate()]))
    for tensor, same in zip((*given, norm.weight), (*plain, alone.weight), strict=True):
        check_close(whole(tensor.grad), same.grad, "gradient")


def a_gain_for_each_head(mesh: DeviceMesh) -> None:
    """Cohere's norm of queries, heads and gains divided together."""
    alone = CohereLayerNorm((4, 8))
    with torch.no_grad():
        alone.weight.add_(0.3 * torch.randn(4, 8))
    norm = normswap.patch(copy.deepcopy(alone))
    norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Shard(0)]))
    x = torch.randn(2, 3, 4, 8)
    with counting() as calls:
        y = norm(distribute_tensor(x, mesh, [Shard(2)]))
    assert calls == [] and y.placements == (Shard(2),)
    check_close(y.full_tensor().detach(), alone(x).detach(), "result")


def channels_of_an_image(mesh: DeviceMesh) -> None:
    """Rows along the channels go to the original, divided or not."""
    alone = ConvNextLayerNorm(8, data_format="channels_first")
    norm = replicate(normswap.patch(copy.deepcopy(alone)), mesh)
    x = torch.randn(2, 8, 4, 6)
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        y = norm(distribute_tensor(x, mesh, [placement]))
        check_close(y.full_tensor().detach(), alone(x).detach(), "result")


def sequence_parallel(mesh: DeviceMesh, patched: str) -> None:
    """A Llama whose residual stream is divided along the sequence: its norms get DTensors."""
    model = tiny("llama")
    if patched == "before":
        normswap.patch(model)
    split, full = Shard(1), Replicate()
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=full, output_layouts=split, use_local_output=False),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=split, output_layouts=full),
    }
    for layer in range(len(layers_of(model))):
        of_layer = {
            "input_layernorm": SequenceParallel(),
            "post_attention_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": split}, desired_input_kwarg_layouts={"hidden_states": full}
            ),
            "mlp": PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(full,)),
            "self_attn.o_proj": RowwiseParallel(output_layouts=split, use_local_output=False),
            "mlp.down_proj": RowwiseParallel(output_layouts=split, use_local_output=False),
        }
        of_layer |= {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        of_layer |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"model.layers.{layer}.{name}": style for name, style in of_layer.items()}
    parallelize_module(model, mesh, plan)
    if patched == "after":
        normswap.patch(model)
    seen = []
    for norm in norms_of(model):
        norm.register_forward_hook(lambda _, args, result: seen.append((args[0].placements, result.placements)))
    check_fused_step(model, "llama", data_parallel=False)
    assert set(seen) == {((split,), (split,))}


def linears_parallel(mesh: DeviceMesh, patched: str, data: int = 1) -> None:
    """A Gemma 2 whose linears are divided: the norms after them get results that are on their way."""
    model = tiny("gemma2")
    if patched == "before":
        normswap.patch(model)
    plan = {}
    for layer in range(len(layers_of(model))):
        columns = [*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj"]
        plan |= {f"model.layers.{layer}.{name}": ColwiseParallel() for name in columns}
        plan |= {f"model.layers.{layer}.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    if data == 1:
        parallelize_module(model, mesh, plan)
    else:
        both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, both["tensor"], plan)
        for layer in layers_of(model):
            fully_shard(layer, mesh=both["data"])
        fully_shard(model, mesh=both["data"])
    if patched == "after":
        normswap.patch(model)
    check_fused_step(model, "gemma2", data_parallel=False)


def a_sharded_gain_is_probed(mesh: DeviceMesh) -> None:
    """Recognition and its proof on the spot work for parameters of which a rank holds a part, or none."""
    for shape, placement in (((8,), Shard(0)), ((3,), Shard(0)), ((8,), Replicate())):
        norm = LlamaRMSNorm(shape)
        norm.weight = nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [placement]))
        parameter = norm.weight
        normswap.patch(norm)
        assert norm.weight is parameter
        assert len(list(modules.fused_norms(norm))) == 1


CASES: dict[str, Case] = {
    f"whole_rows[{kind}-{placed}]": functools.partial(whole_rows, kind=kind, placed=placed)
    for kind in NORMS
    for placed in PLACEMENTS
}
CASES |= {f"split_rows[{kind}]": functools.partial(split_rows, kind=kind) for kind in NORMS}
CASES |= {f"pending_sums[{kind}]": functools.partial(pending_sums, kind=kind) for kind in NORMS}
CASES |= {f"heads[{placed}]": functools.partial(heads, placed=placed) for placed in ("heads", "rows", "apart")}
CASES |= {f"gated[{where}]": functools.partial(gated, of_gate=where) for where in ("beside", "apart")}
for _when in ("before", "after"):
    CASES[f"sequence_parallel[{_when}]"] = functools.partial(sequence_parallel, patched=_when)
    CASES[f"linears_parallel[{_when}]"] = functools.partial(linears_parallel, patched=_when)
    CASES[f"linears_parallel_and_fsdp[{_when}]"] = functools.partial(linears_parallel, patched=_when, data=2)
for _case in (
    no_mixture,
    strided_rows,
    two_dimensions,
    compiled,
    on_its_way,
    a_sharded_gain_is_probed,
    a_gain_for_each_head,
    channels_of_an_image,
):
    CASES[_case.__name__] = _case

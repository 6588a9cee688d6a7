"""From a checkpoint to a transformers model or tokenizer, with mistakes told in one line."""

from __future__ import annotations

import contextlib
import importlib
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn

from normswap.errors import CheckpointError, ModelError
from normswap.quiet import first_line, quiet
from normswap.source import Source, resolve

__all__ = [
    "Source",
    "build_meta",
    "check_complete",
    "load_model",
    "load_tokenizer",
    "meta_parameters",
    "model_class",
    "quantization",
    "resolve",
    "told",
]

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt", "vocab.json", "merges.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "spm.model", "*.tiktoken", "tekken.json"),
)
_MASKED_FIRST = ("MaskedLM", "CausalLM", "Seq2SeqLM")
_CAUSAL_FIRST = ("CausalLM", "Seq2SeqLM", "MaskedLM")
_SEQ2SEQ_FIRST = ("SpeechSeq2Seq", "Seq2SeqLM", "CausalLM", "MaskedLM")
_OTHER_HEADS = ("CTC", "MaskedImageModeling", "ZeroShotImageClassification", "PreTraining")


def model_class(source: Source) -> type:
    """Return the class of the checkpoint's model.

    It is the one that the configuration names under ``architectures``; for a checkpoint with its own code
    (``auto_map``), the class of that code when it is trusted; else the most specific auto class that knows
    the configuration.

    Raises:
        ModelError: no class of transformers fits, or the class needs code that is not trusted.
    """
    config = source.config
    named = (getattr(config, "architectures", None) or [None])[0]
    auto_map = getattr(config, "auto_map", None) or {}
    if source.trust_remote_code and (reference := _remote_reference(auto_map, named)):
        return _remote_class(source, reference)
    if isinstance(named, str) and (native := _native_class(config, named)):
        return native
    for auto in _auto_classes(config):
        mapping = auto._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, (list, tuple)) else found
    if auto_map:
        raise ModelError(
            f"{source.name} defines its model {named or ''} in its own Python code; read that code and, if "
            "you trust it, allow it with --trust-remote-code (trust_remote_code=True)"
        )
    raise ModelError(
        f"expected a model class for {type(config).__name__} (architectures: {named}), transformers "
        f"{transformers.__version__} has none; "
        + ("upgrade transformers" if named else "name the class in the configuration, under 'architectures'")
    )


def build_meta(source: Source) -> nn.Module:
    """Build the model in eval mode on the meta device: from the configuration alone, no weights are read.

    Raises:
        ModelError: the configuration does not give a model.
    """
    cls = model_class(source)
    try:
        with quiet():
            try:
                with torch.device("meta"):
                    model = cls._from_config(source.config)  # type: ignore[attr-defined]
            except (RuntimeError, NotImplementedError):
                # Code that computes on tensors while it builds fails on meta: make only the parameters meta.
                with meta_parameters():
                    model = cls._from_config(source.config)  # type: ignore[attr-defined]
    except Exception as error:
        raise ModelError(
            f"cannot build {cls.__name__} from the config of {source.name}: {first_line(error)}"
        ) from error
    _to_meta(model)
    return model.eval()


def load_model(source: Source, *, dtype: torch.dtype, device: str | torch.device = "cpu", **kwargs: Any) -> nn.Module:
    """Load the model with its weights, in eval mode.

    Tensors that the checkpoint holds and the model does not use are fine. Tensors that the model needs and
    the checkpoint lacks are an error, because transformers would fill them with random numbers. One
    exception: a missing pooler (encoder checkpoints are often saved without) is a warning, because nothing
    else reads it.

    Args:
        source: what `resolve` found.
        dtype: dtype of the weights in memory. A quantized checkpoint keeps its quantized weights.
        device: where the model goes.
        **kwargs: handed to ``from_pretrained``.

    Raises:
        CheckpointError: tensors are missing, damaged or of another shape than the configuration says.
        ModelError: the model cannot be loaded here (a library, memory or a device is missing).
    """
    cls = model_class(source)
    lenient = kwargs.get("ignore_mismatched_sizes", False)
    options: dict[str, Any] = {
        "dtype": dtype,
        "local_files_only": True,
        "trust_remote_code": source.trust_remote_code,
        **kwargs,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }
    if source.settings_of is not None:
        options["config"] = source.config
    method = quantization(source.config)
    if method and torch.device(device).type != "cpu":
        options.setdefault("device_map", {"": str(device)})
    # What transformers fills in for a missing pooler is random; one seed makes two loads of one checkpoint alike.
    with told(source, method), quiet(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model, info = cls.from_pretrained(str(source.path), **options)  # type: ignore[attr-defined]
    check_complete(source, info, lenient)
    if "device_map" not in options:
        with told(source, method):
            model = model.to(device)
    return model.eval()


def load_tokenizer(source: Source) -> Any:
    """Load the checkpoint's tokenizer; None when the folder carries none.

    Raises:
        ModelError: there is one, and it cannot be loaded here.
    """
    if not any(any(source.path.glob(name)) for name in _TOKENIZER_FILES):
        return None
    try:
        with quiet():
            return transformers.AutoTokenizer.from_pretrained(
                str(source.path), local_files_only=True, trust_remote_code=source.trust_remote_code
            )
    except Exception as error:
        # A tokenizer class of a later transformers is, at bottom, its tokenizer.json.
        if (source.path / "tokenizer.json").is_file():
            with contextlib.suppress(Exception), quiet():
                return transformers.PreTrainedTokenizerFast.from_pretrained(str(source.path), local_files_only=True)
        raise ModelError(f"cannot load the tokenizer of {source.name}: {first_line(error)}") from error


def _native_class(config: transformers.PretrainedConfig, named: str) -> type | None:
    """Find a class by name in transformers, also one that only its own module exports, as towers are."""
    places: list[Any] = [transformers]
    home, _, module = type(config).__module__.rpartition(".")
    if home.startswith("transformers.") and module.startswith("configuration_"):
        with contextlib.suppress(ImportError):
            places.append(importlib.import_module(f"{home}.{module.replace('configuration_', 'modeling_', 1)}"))
    for place in places:
        found = getattr(place, named, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    return None


def _auto_classes(config: transformers.PretrainedConfig) -> Iterator[Any]:
    if getattr(config, "is_encoder_decoder", False):
        heads: tuple[str, ...] = _SEQ2SEQ_FIRST
    else:
        heads = _CAUSAL_FIRST if getattr(config, "is_decoder", False) else _MASKED_FIRST
    for head in ("ImageTextToText", *heads, *_OTHER_HEADS):
        if auto := getattr(transformers, f"AutoModelFor{head}", None):
            yield auto
    yield transformers.AutoModel


def _remote_reference(auto_map: dict[str, Any], named: str | None) -> str | None:
    models = {key: value for key, value in auto_map.items() if key.startswith("AutoModel")}
    for value in models.values():
        if isinstance(value, str) and value.split(".")[-1] == named:
            return value
    order = [f"AutoModelFor{head}" for head in (*_CAUSAL_FIRST, *_OTHER_HEADS)]
    ranked = sorted(models, key=lambda key: (key == "AutoModel", order.index(key) if key in order else len(order)))
    return models[ranked[0]] if ranked else None


def _remote_class(source: Source, reference: str) -> type:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    try:
        with quiet():
            folder = source.settings_of or source.path
            return get_class_from_dynamic_module(reference, str(folder), local_files_only=True)
    except Exception as error:
        raise ModelError(f"cannot load {reference} from the code of {source.name}: {first_line(error)}") from error


def quantization(config: Any) -> str | None:
    """Return the name of the method that a configuration says its weights are quantized by; None without one."""
    found = getattr(config, "quantization_config", None)
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method) or "an unnamed method")


def check_complete(source: Source, info: dict[str, Any], lenient: bool) -> None:
    """Refuse what transformers would fill with random numbers, and warn of a missing pooler.

    Args:
        source: what was loaded.
        info: what ``from_pretrained`` tells of it with ``output_loading_info``.
        lenient: whether tensors of another shape are fine.

    Raises:
        CheckpointError: tensors are missing, or of another shape than the configuration says.
    """
    wrong = sorted(info["mismatched_keys"])
    if wrong and not lenient:
        # transformers 5 gives key, shape found and shape expected; transformers 4 the key alone.
        key, *shapes = (wrong[0],) if isinstance(wrong[0], str) else wrong[0]
        told = f" has {tuple(shapes[0])}, expected {tuple(shapes[1])}" if shapes else ""
        raise CheckpointError(
            f"{len(wrong)} tensors of {source.name} do not have the shape that its config gives: {key}{told}; "
            "config.json and weights belong to different models"
        )
    missing = sorted(info["missing_keys"])
    pooler = [key for key in missing if "pooler" in key.split(".")]
    lacking = [key for key in missing if key not in pooler]
    if lacking:
        shown = ", ".join(lacking[:3]) + (", ..." if len(lacking) > 3 else "")
        hint = "" if getattr(source.config, "architectures", None) else "; config.json names no architectures"
        raise CheckpointError(
            f"the checkpoint {source.name} lacks {len(lacking)} tensors that its model needs: {shown}; "
            f"transformers would fill them with random numbers{hint}"
        )
    if pooler:
        warnings.warn(
            f"{source.name} has no weights for its pooler ({', '.join(pooler)}): transformers fills it with "
            "random numbers, so pooler_output means nothing, with or without normswap",
            stacklevel=3,
        )


@contextlib.contextmanager
def told(source: Source, method: str | None) -> Iterator[None]:
    """Turn what goes wrong while loading into one line of ours."""
    lead = f"cannot load {source.name}"
    if method:
        lead += f", which is quantized with {method}"
    try:
        yield
    except (SafetensorError, pickle.UnpicklingError, EOFError, OSError) as error:
        raise CheckpointError(f"{lead}: {first_line(error)}; fetch the checkpoint again") from error
    except ImportError as error:
        raise ModelError(f"{lead}: a library is missing: {first_line(error)}") from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ModelError(f"{lead}: out of memory; try a narrower dtype or another device") from error
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, AssertionError) as error:
        raise ModelError(f"{lead}: {first_line(error)}") from error


def _to_meta(model: nn.Module) -> None:
    """Move what a model made elsewhere in spite of the device context, keeping ties (`nn.Module.to` unties)."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, value in store.items():
                if value is None or value.device.type == "meta":
                    continue
                if value not in moved:
                    there = value.detach().to("meta")
                    moved[value] = (
                        nn.Parameter(there, requires_grad=value.requires_grad)
                        if isinstance(value, nn.Parameter)
                        else there
                    )
                store[name] = moved[value]  # type: ignore[assignment]


@contextlib.contextmanager
def meta_parameters() -> Iterator[None]:
    """Put every parameter that is registered meanwhile on the meta device; buffers stay where they are made."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]

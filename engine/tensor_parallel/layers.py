"""The layers of one rank: transformers' plan for a model decides how each is cut, and these modules join the parts.

transformers cuts the weights while it loads them. Its own forwards work on distributed tensors and are replaced here by
plain layers on plain tensors, so that `engine/cpu/optimize` and GPU kernels see what they know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from tandem.engine.tensor_parallel.group import RankGroup
from tandem.protocol.errors import ConfigError

_EXPERTS = "moe_tp_experts"  # each rank has a part of every expert
# Styles that change no forward: parts that need the next layer's sum, whole copies, and what only gradients need.
_UNCHANGED = frozenset(
    {"colwise", "packed_colwise", "replicate", "local_params", "mla_kv_a_proj", "replicated_with_grad_allreduce"}
)


class _RowParallel(nn.Module):
    """A linear layer whose input features are divided among the ranks."""

    def __init__(self, linear: nn.Linear, group: RankGroup, *, cuts_input: bool) -> None:
        super().__init__()
        self.bias = linear.bias
        linear.register_parameter("bias", None)
        self.linear = linear
        self._group = group
        self._features = _part_of(linear.weight.shape[1], group) if cuts_input else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., T, in], or this rank's part of it -> [..., T, out]"""
        if self._features is not None:
            x = x[..., self._features]
        total = self._group.all_reduce(self.linear(x))
        return total if self.bias is None else total + self.bias


class _GatheredColumns(nn.Module):
    """A linear layer whose output features are divided among the ranks; all ranks get all outputs."""

    def __init__(self, linear: nn.Linear, width: int, group: RankGroup) -> None:
        super().__init__()
        self.linear = linear
        self.out_features = width
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """x [..., T, in] -> [..., T, width]"""
        return self._group.all_gather(self.linear(x), self.out_features)


class _ShardedEmbedding(nn.Module):
    """An embedding whose tokens are divided among the ranks."""

    def __init__(self, embedding: nn.Embedding, vocab_size: int, group: RankGroup) -> None:
        super().__init__()
        self.embedding = embedding
        embedding.num_embeddings = embedding.weight.shape[0]
        embedding.padding_idx = None
        self._first = group.rank * -(-vocab_size // group.size)
        self._group = group

    @property
    def weight(self) -> Tensor:
        """This rank's part; some models look at its dtype."""
        return self.embedding.weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [...] -> [..., width]"""
        local = token_ids - self._first
        is_elsewhere = (local < 0) | (local >= self.embedding.num_embeddings)
        vectors = self.embedding(local.masked_fill(is_elsewhere, 0))
        return self._group.all_reduce(vectors.masked_fill(is_elsewhere.unsqueeze(-1), 0))


def localize(model: PreTrainedModel, group: RankGroup) -> None:
    """Turn a model that transformers has loaded for this rank into plain layers. Raises ConfigError for unknown styles.

    Call `sum_experts` once other replacements are made.
    """
    styles = _styles_of(model)
    widths = {name: _whole_width(module) for name, module in model.named_modules() if name in styles}
    for module in model.modules():
        vars(module).pop("forward", None)  # transformers' own for distributed tensors
    _use_local_parameters(model)
    for name, style in styles.items():
        module = model.get_submodule(name) if name in widths else None
        if module is None or style in _UNCHANGED or style == _EXPERTS:
            continue
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _replacement(model, name, style, module, widths[name], group))


def sum_experts(model: PreTrainedModel, group: RankGroup) -> None:
    """Let each mixture of experts return the sum of the ranks' parts."""
    for name, style in _styles_of(model).items():
        if style == _EXPERTS:
            module = model.get_submodule(name)
            module.forward = _summed(module.forward, group)


def _styles_of(model: PreTrainedModel) -> dict[str, str]:
    """The style of each module and parameter that the plan names."""
    plan: dict[str, str] = model.tp_plan
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    return {name: plan[key] for name in names if (key := replace_layer_number_by_wildcard(name)) in plan}


def _replacement(model: PreTrainedModel, name: str, style: str, module: Any, width: int, group: RankGroup) -> nn.Module:
    if style in ("rowwise", "rowwise_split_input", "rowwise_rep"):
        return _RowParallel(module, group, cuts_input=style != "rowwise")
    if style in ("colwise_gather_output", "colwise_rep"):
        return _GatheredColumns(module, width, group)
    if style == "embedding_rowwise":
        return _ShardedEmbedding(module, width, group)
    raise ConfigError(
        f"{type(model).__name__} cannot be served by {group.size} ranks: its plan in transformers cuts {name} by "
        f"{style!r}, which this engine does not know; use tensor_parallel_size=1, or serve it by vLLM or SGLang"
    )


def _whole_width(module: nn.Module) -> int:
    """First dimension of the whole weight, over all ranks; 0 for modules without a weight."""
    weight = getattr(module, "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) and weight.dim() else 0


def _use_local_parameters(model: nn.Module) -> None:
    """Replace distributed parameters by this rank's parts, and the widths of linear layers by theirs."""
    local: dict[int, nn.Parameter] = {}  # by identity: tied parameters stay tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                if id(parameter) not in local:
                    local[id(parameter)] = nn.Parameter(parameter.to_local().detach(), requires_grad=False)
                module._parameters[name] = local[id(parameter)]
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape


def _part_of(part: int, group: RankGroup) -> slice:
    """This rank's features, if it has `part` of them."""
    return slice(group.rank * part, (group.rank + 1) * part)


def _summed(forward: Callable[..., Tensor], group: RankGroup) -> Callable[..., Tensor]:
    def summed(*args: Any, **kwargs: Any) -> Tensor:
        return group.all_reduce(forward(*args, **kwargs))

    return summed

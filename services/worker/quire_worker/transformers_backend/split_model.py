"""SplitModel: a causal model of transformers in two parts. A step runs the layers for all of its rows, and the head
only for the rows that need logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class SplitModel:
    """`layers` computes hidden rows from tokens. The head is the whole model, in which a module that returns its input
    replaces the layers. So the model's own code scales and caps logits."""

    def __init__(self, model: Any) -> None:
        found = model.get_decoder()
        self.layers: Any = model.model if found is model else found
        (name,) = (name for name, module in model.named_modules() if module is self.layers)
        self._hidden_rows = _HiddenRows()
        model.set_submodule(name, self._hidden_rows)
        self._head = model

    def hidden(self, token: Tensor, position: Tensor | None, mask: Tensor | None = None) -> Tensor:
        """Run the layers: token, position [R] int64 -> hidden [R, H]. Without positions, the rows are one sequence, and
        the model numbers them. `mask`: [1, R] of ones makes transformers ask for a mask of each layer. The head learns
        the class of the layers' output here, so a call of `hidden` must come before `logits`."""
        output = self.layers(
            input_ids=token[None],
            position_ids=None if position is None else position[None],
            attention_mask=mask,
            use_cache=False,
            return_dict=True,
        )
        self._hidden_rows.set_output_class(type(output))
        rows: Tensor = output.last_hidden_state[0]
        return rows

    def replace_children(self, replacements: Callable[[nn.Module], dict[str, nn.Module]]) -> int:
        """Replace the children that `replacements` names of each module of the layers. Returns how many were
        replaced."""
        replaced = 0
        for name in [name for name, _ in self.layers.named_modules()]:
            module = self.layers.get_submodule(name)
            for child, new in replacements(module).items():
                module.set_submodule(child, new)
                replaced += 1
        return replaced

    def replace_modules(self, replacement: Callable[[nn.Module], nn.Module | None]) -> int:
        """Replace the modules of the layers for which `replacement` returns another one. Modules inside of a replaced
        one are not asked, nor are the layers as a whole. A module that several places share is asked at most once, and
        replaced only under its first name. Returns how many were replaced."""
        replaced: list[str] = []
        # By name: a list of the modules would keep the weights of those that were replaced.
        for name in [name for name, _ in self.layers.named_modules() if name]:
            if any(name.startswith(f"{outer}.") for outer in replaced):
                continue
            if (new := replacement(self.layers.get_submodule(name))) is not None:
                self.layers.set_submodule(name, new)
                replaced.append(name)
        return len(replaced)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> logits [N, V]."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits[0]
        return logits


class _HiddenRows(nn.Module):
    """Replaces the layers in the head: its output is its input."""

    def __init__(self) -> None:
        super().__init__()
        self._output_class: Any = None

    def set_output_class(self, output_class: Any) -> None:
        """Set the class of the layers' output, which the head expects."""
        self._output_class = output_class

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> Any:
        """Return the hidden rows as the layers would."""
        return self._output_class(last_hidden_state=inputs_embeds)

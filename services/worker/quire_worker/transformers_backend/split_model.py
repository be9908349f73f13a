"""SplitModel: a causal model of transformers in two parts. A step runs the layers for all of its rows, and the head
only for the rows that need logits."""

from __future__ import annotations

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
        """token, position [R] int64 -> hidden [R, H]. Without positions, the rows are one sequence, and the model
        numbers them. `mask`: [1, R] of ones makes transformers ask for a mask of each layer."""
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

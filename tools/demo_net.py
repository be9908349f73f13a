"""The demo model's network: a small Llama in plain torch, with the parameter names of Hugging Face checkpoints.

This module knows shapes, attention and sampling, and nothing of text, tokenizers, files or training. It does not share
code with the serving worker, so its weights can test the worker's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


@dataclass(frozen=True)
class NetShape:
    """All sizes of one Llama. Input and output embeddings are always tied."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int = 8192
    rope_theta: float = 10000.0
    rms_eps: float = 1e-5

    @property
    def parameters(self) -> int:
        """Number of weights, the tied embedding counted once."""
        attention = self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        per_layer = attention + feed_forward + 2 * self.hidden_size
        return self.vocab_size * self.hidden_size + self.layers * per_layer + self.hidden_size


class KvCache:
    """Keys and values of one batch, for generation. All rows have the same length."""

    def __init__(self, shape: NetShape, rows: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        size = (shape.layers, rows, shape.kv_heads, capacity, shape.head_dim)
        self.keys = torch.zeros(size, device=device, dtype=dtype)
        self.values = torch.zeros(size, device=device, dtype=dtype)
        self.length = 0

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new positions of a layer and return all of its keys and values so far."""
        end = self.length + key.shape[2]
        self.keys[layer, :, :, self.length : end] = key
        self.values[layer, :, :, self.length : end] = value
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class RmsNorm(nn.Module):
    """Root-mean-square normalisation with learned weights."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the half-split layout that Hugging Face checkpoints assume."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal attention. Several query heads share each key and value head."""

    def __init__(self, shape: NetShape, layer: int, dropout: float) -> None:
        super().__init__()
        self.shape, self.layer, self.dropout = shape, layer, dropout
        self.q_proj = nn.Linear(shape.hidden_size, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KvCache | None) -> Tensor:
        rows, length, _ = x.shape
        dim = self.shape.head_dim
        query = rotate(self.q_proj(x).view(rows, length, -1, dim).transpose(1, 2), cos, sin)
        key = rotate(self.k_proj(x).view(rows, length, -1, dim).transpose(1, 2), cos, sin)
        value = self.v_proj(x).view(rows, length, -1, dim).transpose(1, 2)
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=length > 1,  # a prompt enters an empty cache whole; after it tokens come one at a time
            enable_gqa=True,
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: NetShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, shape: NetShape, layer: int, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(shape, layer, dropout)
        self.mlp = FeedForward(shape)
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_eps)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KvCache | None) -> Tensor:
        x = x + self.drop(self.self_attn(self.input_layernorm(x), cos, sin, cache))
        return x + self.drop(self.mlp(self.post_attention_layernorm(x)))


class Trunk(nn.Module):
    """Embedding, layers and final norm. This class exists so that parameter names begin with `model.`."""

    def __init__(self, shape: NetShape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, layer, dropout) for layer in range(shape.layers))
        self.norm = RmsNorm(shape.hidden_size, shape.rms_eps)


class Llama(nn.Module):
    """The whole network. Weights are float32 during training, and autocast chooses the arithmetic."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: NetShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape, dropout)
        self.drop = nn.Dropout(dropout)
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.arange(shape.max_positions, dtype=torch.float32)[:, None] * shape.rope_theta ** -half[None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Projections back into the residual stream start smaller, so that depth does not raise its variance.
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens: Tensor, cache: KvCache | None = None, last_only: bool = False) -> Tensor:
        """Compute logits for int64 tokens [rows, length]. With a cache, the tokens continue the tokens in the cache."""
        start = cache.length if cache is not None else 0
        end = start + tokens.shape[1]
        x = self.drop(self.model.embed_tokens(tokens))
        cos, sin = self.cos[start:end].to(x.dtype), self.sin[start:end].to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin, cache)
        if cache is not None:
            cache.length = end
        x = self.model.norm(x[:, -1:] if last_only else x)
        return functional.linear(x, self.model.embed_tokens.weight)


@torch.no_grad()
def generate(
    net: Llama,
    prompts: Tensor,
    new_tokens: int,
    temperatures: Sequence[float],
    generator: torch.Generator,
    stop_ids: Sequence[int] = (),
) -> Tensor:
    """Continue equally long prompts [rows, length]. Each row has its own temperature (0 is greedy).

    With stop_ids, generation ends early when every row has stopped. A row that has stopped is filled with its stop
    token.
    """
    device = prompts.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cache = KvCache(net.shape, len(prompts), prompts.shape[1] + new_tokens, device, dtype)
    heat = torch.tensor(temperatures, device=device, dtype=torch.float32)[:, None]
    stops = torch.tensor(list(stop_ids), device=device, dtype=torch.long)
    stopped = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    tokens, pieces = prompts, [prompts]
    for _ in range(new_tokens):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = net(tokens, cache, last_only=True)[:, -1].float()
        # Gumbel noise scaled by the temperature makes the greedy and the sampled rows one argmax.
        noise = -torch.empty_like(logits).exponential_(generator=generator).log()
        chosen = (logits + noise * heat).argmax(-1, keepdim=True)
        if len(stops):
            chosen = torch.where(stopped[:, None], tokens[:, -1:], chosen)
            stopped |= torch.isin(chosen[:, 0], stops)
        tokens = chosen
        pieces.append(chosen)
        if len(stops) and bool(stopped.all()):
            break
    return torch.cat(pieces, dim=1)

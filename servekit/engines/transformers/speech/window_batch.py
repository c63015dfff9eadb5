"""Windows of recordings that are transcribed together.

    begin   encode new windows in one pass, compute what the decoder reads of them, and read their
            prompts: this gives their first tokens
    step    compute the next token of every window in one pass; windows that end leave

Windows begin and end between steps, and each has its own rules and length. On a GPU a step is a
CUDA graph. The arithmetic is that of transformers' WhisperDecoder, with keys and values at fixed
addresses; window n is in seat n of them, and the last one moves into a seat that becomes free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from servekit.engines.transformers.decode.graphs import Graphs
from servekit.engines.transformers.speech.token_rules import TokenRules

#: Windows in one pass of the encoder. One alone uses a CPU fully.
CUDA_ENCODED, CPU_ENCODED = 8, 1


@dataclass(eq=False)
class Window:
    """A window of a recording, and what is written of it so far."""

    features: Tensor  # [1, mel bins, frames], on the device
    prompt: list[int]
    most: int  # tokens, with the prompt
    timed: bool  # with timestamps
    scored: bool  # with log probabilities of the tokens
    language_at: int | None = None  # place in the prompt for the language, if it is to be found
    temperature: float = 0.0
    top_k: int = 0
    noise: torch.Generator | None = None  # if the temperature is above 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def last_position(self) -> int:
        """Return the place of the last token."""
        return len(self.prompt) + len(self.tokens) - 1


def count_seat_bytes(config: Any, itemsize: int) -> int:
    """Return the memory for one window: its keys and values, and the scores of a token."""
    places = config.max_target_positions + config.max_source_positions
    cache: int = 2 * config.decoder_layers * places * config.d_model * itemsize
    return cache + 8 * int(config.vocab_size)


def count_encoder_bytes(config: Any, itemsize: int, cuda: bool) -> int:
    """Return the memory for a pass of the encoder beside its weights."""
    places = (CUDA_ENCODED if cuda else CPU_ENCODED) * config.max_source_positions
    return int(places * (2 * config.encoder_ffn_dim + 8 * config.d_model) * itemsize)


class WindowBatch:
    """A batch of at most `seats` windows; used by one thread."""

    def __init__(self, model: Any, seats: int, graphs: bool) -> None:
        """Allocate the memory, and record graphs if they are wanted and the device has them."""
        config, device, dtype = model.config, model.device, model.dtype
        self.windows: list[Window] = []
        self.seats = seats
        self._encoder, self._decoder = model.get_encoder(), model.model.decoder
        self._head, self._device = model.get_output_embeddings(), device
        self._start: int = model.generation_config.decoder_start_token_id
        languages = getattr(model.generation_config, "lang_to_id", None) or {}
        self._languages = torch.tensor(sorted(languages.values()), device=device)
        self._rules = TokenRules(model.generation_config, self._head.out_features, device)
        self._places = config.max_target_positions
        heads = config.decoder_attention_heads
        self._head_size = config.d_model // heads

        def allocate(places: int) -> Tensor:  # [keys and values, layers, seats, heads, places, _]
            shape = (2, config.decoder_layers, seats, heads, places, self._head_size)
            return torch.zeros(shape, dtype=dtype, device=device)

        self._own, self._heard = allocate(self._places), allocate(config.max_source_positions)
        on_gpu = device.type == "cuda"
        # For each seat: the last token, its position, and the bounds of the next.
        self._host = torch.zeros(6, seats, dtype=torch.int64, pin_memory=on_gpu)
        self._state = torch.zeros(6, seats, dtype=torch.int64, device=device)
        self._chosen = torch.zeros(seats, dtype=torch.int64, device=device)
        self._scores = torch.zeros(seats, self._head.out_features, device=device)
        self._graphs = Graphs(device, graphs)
        if self._graphs.on:
            self._record_graphs()

    @property
    def free(self) -> int:
        """Return how many windows can begin together now."""
        most = CUDA_ENCODED if self._device.type == "cuda" else CPU_ENCODED
        return min(self.seats - len(self.windows), most)

    @torch.no_grad()
    def begin(self, windows: Sequence[Window]) -> list[Window]:
        """Take at most `free` windows, and return those that have ended at once."""
        first = len(self.windows)
        seats = slice(first, first + len(windows))
        self._own[:, :, seats] = 0  # a NaN of an earlier window would count even where masked
        self._encode(windows, seats)
        if any(window.language_at is not None for window in windows):
            self._find_languages(windows, seats)
        longest = max(len(window.prompt) for window in windows)
        # What is written after a shorter prompt is overwritten by its own tokens.
        ids = torch.tensor(
            [window.prompt + [0] * (longest - len(window.prompt)) for window in windows]
        )
        self._write_state(windows, seats)
        hidden = self._run_decoder(ids.to(self._device), seats, longest)
        lengths = torch.tensor([len(window.prompt) for window in windows], device=self._device)
        last = hidden[torch.arange(len(windows), device=self._device), lengths - 1]
        self._choose(last, seats, any(window.timed for window in windows))
        self.windows += windows
        return self._read_tokens(windows, seats)

    @torch.no_grad()
    def step(self) -> list[Window]:
        """Write a token of every window, and return those that have ended; they leave."""
        seats = slice(0, len(self.windows))
        self._write_state(self.windows, seats)
        self._decode(len(self.windows))
        return self._read_tokens(list(self.windows), seats)

    def free_seat(self, window: Window) -> None:
        """Free the seat of a window."""
        seat, last = self.windows.index(window), len(self.windows) - 1
        if seat != last:
            for cache in (self._own, self._heard):
                cache[:, :, seat] = cache[:, :, last]
        self.windows[seat] = self.windows[last]
        self.windows.pop()

    # ---- before the first token

    def _encode(self, windows: Sequence[Window], seats: slice) -> None:
        features = torch.cat([window.features for window in windows])
        encoded: Tensor = self._encoder(features).last_hidden_state
        for layer, module in enumerate(self._decoder.layers):
            attention = module.encoder_attn
            self._heard[0, layer, seats] = self._split_heads(attention.k_proj(encoded))
            self._heard[1, layer, seats] = self._split_heads(attention.v_proj(encoded))

    def _find_languages(self, windows: Sequence[Window], seats: slice) -> None:
        """Write the languages into the prompts that lack them."""
        ids = torch.full((len(windows), 1), self._start, device=self._device)
        logits = self._head(self._run_decoder(ids, seats, 1)[:, -1])
        found = self._languages[logits[:, self._languages].argmax(-1)].tolist()
        for window, language in zip(windows, found, strict=True):
            if window.language_at is not None:
                window.prompt[window.language_at] = language

    # ---- one token

    def _write_state(self, windows: Sequence[Window], seats: slice) -> None:
        columns = [
            (
                (window.tokens or window.prompt)[-1],
                window.last_position,
                *self._rules.bound(window.tokens, window.timed),
            )
            for window in windows
        ]
        self._host[:, seats] = torch.tensor(columns).T
        self._state.copy_(self._host, non_blocking=True)

    @torch.no_grad()
    def _record_graphs(self) -> None:
        for count in range(1, self.seats + 1):
            self._decode(count)

    def _decode(self, count: int) -> None:
        """Compute the next tokens of the first `count` seats, and perhaps of some empty ones."""
        if not self._graphs.on:
            seats = slice(0, count)
            longest = max(window.last_position for window in self.windows) + 1
            self._compute_step(seats, longest, any(window.timed for window in self.windows))
            return
        rounded = min(1 << (count - 1).bit_length(), self.seats)
        work = partial(self._compute_step, slice(0, rounded), self._places, timed=True)
        self._graphs.run_graph(rounded, work, self._chosen)

    def _compute_step(self, seats: slice, longest: int, timed: bool) -> None:
        ids, positions = self._state[:2, seats].unsqueeze(-1)
        hidden = self._run_decoder(ids, seats, longest, positions)
        self._choose(hidden[:, -1], seats, timed)

    def _run_decoder(
        self, ids: Tensor, seats: slice, longest: int, positions: Tensor | None = None
    ) -> Tensor:
        """Return the last hidden states of tokens, [windows, tokens, size].

        Their positions, [windows, tokens], are those from 0 by default, and below `longest`.
        """
        decoder, device = self._decoder, self._device
        if positions is None:
            positions = torch.arange(ids.shape[1], device=device).expand(ids.shape)
        rows = torch.arange(len(ids), device=device).unsqueeze(-1)
        seen = (torch.arange(longest, device=device) <= positions.unsqueeze(-1)).unsqueeze(1)
        hidden: Tensor = decoder.embed_tokens(ids) + decoder.embed_positions.weight[positions]
        for number, layer in enumerate(decoder.layers):
            normed = layer.self_attn_layer_norm(hidden)
            own, module = self._own[:, number, seats], layer.self_attn
            for place, project in enumerate((module.k_proj, module.v_proj)):
                new = project(normed).view(*ids.shape, -1, self._head_size)
                own[place][rows, :, positions] = new
            hidden = hidden + self._attend(module, normed, own[..., :longest, :], seen)
            normed = layer.encoder_attn_layer_norm(hidden)
            heard = self._heard[:, number, seats]
            hidden = hidden + self._attend(layer.encoder_attn, normed, heard, None)
            normed = layer.final_layer_norm(hidden)
            hidden = hidden + layer.fc2(layer.activation_fn(layer.fc1(normed)))
        normed_last: Tensor = decoder.layer_norm(hidden)
        return normed_last

    def _attend(self, module: Any, normed: Tensor, cache: Tensor, seen: Tensor | None) -> Tensor:
        queries = self._split_heads(module.q_proj(normed) * module.scaling)
        keys, values = cache
        mixed = scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=1.0)
        joined: Tensor = module.out_proj(mixed.transpose(1, 2).flatten(2))
        return joined

    def _split_heads(self, hidden: Tensor) -> Tensor:
        return hidden.view(*hidden.shape[:2], -1, self._head_size).transpose(1, 2)

    def _choose(self, hidden: Tensor, seats: slice, timed: bool) -> None:
        """Choose the likeliest tokens after hidden states [windows, size]."""
        scores = self._rules.apply(self._head(hidden), self._state[2:, seats], timed)
        self._chosen[seats] = scores.argmax(-1)
        self._scores[seats] = scores

    def _read_tokens(self, windows: Sequence[Window], seats: slice) -> list[Window]:
        """Note the tokens that were chosen, and return the windows that have ended."""
        for seat, window in enumerate(windows, seats.start):
            if window.noise is not None:
                self._chosen[seat] = _sample(window, self._scores[seat])
        chosen = self._chosen[seats]
        for window, token in zip(windows, chosen.tolist(), strict=True):
            window.tokens.append(token)
        if any(window.scored for window in windows):
            scores = self._scores[seats].log_softmax(-1)
            logprobs = scores.gather(-1, chosen.unsqueeze(-1)).squeeze(-1).tolist()
            for window, logprob in zip(windows, logprobs, strict=True):
                window.logprobs.append(logprob)
        ended = [
            window
            for window in windows
            if window.tokens[-1] in self._rules.ends or window.last_position + 1 >= window.most
        ]
        for window in ended:
            self.free_seat(window)
        return ended


def _sample(window: Window, scores: Tensor) -> Tensor:
    """Return a token by chance, as the library does."""
    warmed = scores / window.temperature
    if window.top_k:
        least = warmed.topk(min(window.top_k, len(warmed))).values[-1]
        warmed = warmed.masked_fill(warmed < least, -torch.inf)
    return torch.multinomial(warmed.softmax(-1), 1, generator=window.noise)[0]

"""ModelSession: a model, its cache for one run, and the way back from rejected drafts.

Decoders hand over whole contexts and lengths. The session alone knows what is cached, how a cache is rewound, how
encoder-decoder models are called, and which logits are needed. Cached and uncached sessions return the same logits.
Every forward pass goes through `model(...)`.
"""

import copy
import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from utils.decode.engine_forward import MAX_WIDTH, PREFILL_CHUNK, engine_forward, prefill_pass, report_reading
from utils.decode.features import FeatureReader
from utils.decode.generation_rules import GenerationRules
from utils.decode.grammar import Grammar
from utils.decode.kv_cache import GrowingLayer
from utils.decode.model_info import check_memory, check_prompt, context_length, model_name, vocabulary_size
from utils.decode.recurrent import StateCheckpoint, check_cache_support, is_recurrent
from utils.decode.sliding_window import check_sliding_window, empty_cache
from utils.errors import UserError


class ModelSession:
    """One run's use of a model.

    `model` is a transformers causal or encoder-decoder model. `use_cache` keeps keys and values between feeds. Without
    it every feed recomputes the whole context. `rewinds` announces calls of `rewind`. A cache that cannot be rewound is
    refused with a UserError before the first token. `start_token` is the decoder's first id if an encoder-decoder
    config has none. `features` are the hidden states to keep of every row fed, see utils.decode.features.
    The new tokens follow the `grammar` that is set on a session, if any.
    """

    def __init__(
        self,
        model: Any,
        *,
        use_cache: bool = True,
        rewinds: bool = True,
        start_token: int = 0,
        features: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.name = model_name(model)
        self.vocab_size = vocabulary_size(model)
        self.context_length = context_length(model)
        self.grammar: Grammar | None = None
        self._use_cache, self._rewinds, self._start_token = use_cache, rewinds, start_token
        self._reader = FeatureReader(model, features) if features else None
        self._features: tuple[Tensor, ...] = ()  # of the feeds since they were last taken
        self._device = model.device
        self._encoder_ids: Tensor | None = None
        self._encoded: BaseModelOutput | None = None
        self._cache: Any = None
        self._cached = 0  # positions of the context that the cache holds
        self._origin = 0  # context length at which the new tokens begin
        self._rules = GenerationRules.of(model)
        self._checkpoint: StateCheckpoint | None = None
        parameters = _parameters(model)
        self._has_logits_to_keep = "logits_to_keep" in parameters
        # PyTorch copies the whole weight to multiply a slice of states in 16 bits on a CPU, but not for rows by index.
        in_16_bits = getattr(model, "dtype", None) in (torch.bfloat16, torch.float16)
        self._copies_head = in_16_bits and model.device.type == "cpu"
        # Recurrent models such as Mamba name the argument differently.
        self._cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        if use_cache and self._cache_name not in parameters:
            raise self._no_cache()
        self._recurrent = use_cache and is_recurrent(model)
        self._splits_prefills = use_cache and not self._recurrent and not model.config.is_encoder_decoder
        # Some hybrid models would otherwise count the positions of every feed from 0.
        self._passes_positions = self._recurrent and "position_ids" in parameters
        if use_cache:
            # Copies made here have neither cache nor checkpoint, so the checks leave this session untouched.
            check_sliding_window(model, self._fresh)
        if self._recurrent:
            check_cache_support(model, lambda: self._fresh(True), verifies=rewinds)
            self._checkpoint = StateCheckpoint() if rewinds else None

    def begin(self, prompt: list[int]) -> list[int]:
        """Start a run and return the decoder's first context.

        Raises UserError for an empty prompt, ids outside the vocabulary, or a prompt that leaves no room for a token or
        does not fit into memory.
        """
        check_prompt(prompt, self.model)
        check_memory([self.model], len(prompt), remedy="use a shorter prompt")
        # New tokens of an encoder-decoder follow its single start token.
        self._origin = 1 if self.model.config.is_encoder_decoder else len(prompt)
        if not self.model.config.is_encoder_decoder:
            return list(prompt)
        self._encoder_ids = self._upload([prompt])
        sources = (getattr(self.model, "generation_config", None), self.model.config)
        names = ("decoder_start_token_id", "bos_token_id")
        # Any decoder_start_token_id comes before any bos_token_id.
        candidates = (getattr(source, name, None) for name in names for source in sources)
        return [next((start for start in candidates if start is not None), self._start_token)]

    @torch.no_grad()
    def read(self, prompt: list[int]) -> None:
        """Begin, and compute what all runs of this prompt share: the prefill without the last token, or the encoder's
        output.
        """
        # The run feeds the last token itself, since it needs the logits after it.
        prefix = self.begin(prompt)[:-1]
        if self._encoder_ids is not None:
            self._encoded = self.model.get_encoder()(self._encoder_ids, return_dict=True)
        elif prefix:
            self._prefill([prefix])

    def room(self, context: list[int]) -> int | None:
        """How many more tokens fit into the model's context, or None if it has no bound."""
        return None if self.context_length is None else self.context_length - len(context)

    def feed(self, context: list[int], keep: int) -> Tensor:
        """Logits (keep, V) after the last `keep` tokens of the context. Computes only what the cache lacks."""
        return self.feed_rows([context], keep)[0]

    @torch.no_grad()
    def feed_rows(self, contexts: list[list[int]], keep: int) -> Tensor:
        """Logits (B, keep, V) for B contexts of equal length, one for each row of the session's cache."""
        # The text without its last token. In a verify pass, keep = k + 1 rows follow: that token and k drafts.
        known = len(contexts[0]) - keep
        if self._checkpoint is not None and self._checkpoint.is_due(keep):
            if self._cached < known:  # text that was dropped together with the rejected state
                self._forward([context[:known] for context in contexts], keep=1)
            self._checkpoint.keep(self._cache, self._cached)
        return self._forward(contexts, keep)

    def _forward(self, contexts: list[list[int]], keep: int) -> Tensor:
        known = len(contexts[0]) - keep
        if known > self._cached and self._is_prefill(contexts):
            self._prefill([context[:known] for context in contexts])
        # Row 0 of the logits predicts context index length - keep + 1.
        logits = self._rules(self._pass(contexts, keep), len(contexts[0]) - keep + 1 - self._origin)
        if self.grammar is None:
            return logits
        masked = [self.grammar.masked(rows, text[self._origin :]) for rows, text in zip(logits, contexts, strict=True)]
        return torch.stack(masked) if len(masked) > 1 else masked[0][None]

    def _prefill(self, contexts: list[list[int]]) -> None:
        """Feed rows whose logits are not needed: the same passes for every `keep`, which may be faster."""
        end = len(contexts[0])
        with prefill_pass(is_prefill := self._is_prefill(contexts)):
            for stop in [*range(self._cached + PREFILL_CHUNK, end, PREFILL_CHUNK), end] if is_prefill else [end]:
                self._pass([context[:stop] for context in contexts], keep=1)
                if end > PREFILL_CHUNK:
                    report_reading(stop, end)

    def _is_prefill(self, contexts: list[list[int]]) -> bool:
        return self._splits_prefills and len(contexts[0]) - self._cached > MAX_WIDTH

    def _pass(self, contexts: list[list[int]], keep: int) -> Tensor:
        length = len(contexts[0])
        new = [context[self._cached :] for context in contexts]
        with nullcontext() if self._reader is None else self._reader.watching():
            output = self.model(**self._arguments(self._upload(new), keep))
        if self._use_cache:
            self._cache, self._cached = self._cache_of(output), length
        if self._reader is not None:
            # Without a cache each feed recomputes every row, so the earlier rows would be duplicates.
            self._features = (*(self._features if self._use_cache else ()), self._reader.features(output)[0])
        # The first forward pass ran the encoder; later ones receive its output.
        if self._encoder_ids is not None and self._encoded is None:
            self._encoded = BaseModelOutput(last_hidden_state=output.encoder_last_hidden_state)
        return output.logits[:, -keep:]  # type: ignore[no-any-return]  # models without logits_to_keep return all rows

    def take_features(self) -> Tensor | None:
        """The hidden states (rows, F) of everything fed since the last call, or None if none are kept."""
        features, self._features = self._features, ()
        if len(features) > 1:
            return torch.cat(features)
        return features[0] if features else None

    def keep_no_features(self) -> None:
        """Keep no hidden states of what is fed from now on."""
        self._reader, self._features = None, ()

    def rewind(self, length: int) -> None:
        """Forget everything after the first `length` positions. At most once between two feeds."""
        if not self._use_cache or self._cache is None:
            return
        if self._checkpoint is not None:
            self._cache, self._cached = self._checkpoint.rewound(self._cache, self._cached, length)
            return
        excess = max(self._cached - length, 0)
        self._cache.crop(-excess)  # also with 0: sliding windows are trimmed here
        self._cached -= excess

    def pad_cache(self, length: int) -> bool:
        """Extend the cache to this length by copies of its last position, and return whether that is possible. Passes
        then take as long as after a text of this length, but their logits mean nothing.
        """
        layers = getattr(self._cache, "layers", ())
        if not layers or any(type(layer) is not GrowingLayer for layer in layers):
            return False
        for layer in layers:
            shape = [-1, -1, length - self._cached, -1]
            layer.update(layer.keys[..., -1:, :].expand(shape), layer.values[..., -1:, :].expand(shape))
        self._cached = length
        return True

    def fork(self) -> "ModelSession":
        """A second session that continues from here. Neither sees what the other feeds or rewinds later."""
        twin = copy.copy(self)
        twin._cache, twin._checkpoint = copy.deepcopy((self._cache, self._checkpoint))  # together: they share layers
        return twin

    def select(self, rows: list[int]) -> None:
        """Keep these rows of the cache, in this order. Repeats are allowed (beam search)."""
        index = torch.tensor(rows, device=self._device)
        if self._cache is not None:
            self._cache.reorder_cache(index)
        if self._encoded is not None:
            hidden = self._encoded.last_hidden_state
            self._encoded = BaseModelOutput(last_hidden_state=hidden.index_select(0, index))

    @property
    def rewind_method(self) -> str:
        """How rejected drafts leave the cache: "cropped", or "copied, and computed again" for recurrent states."""
        return "copied, and computed again" if self._recurrent else "cropped"

    def _fresh(self, use_cache: bool) -> "ModelSession":
        twin = copy.copy(self)
        twin._use_cache = use_cache
        return twin

    def _arguments(self, new: Tensor, keep: int) -> dict[str, Any]:
        arguments: dict[str, Any] = {"use_cache": self._use_cache, "return_dict": True}
        if self._use_cache:
            arguments[self._cache_name] = self._cache if self._cache is not None else self._empty_cache()
        if self._passes_positions:
            positions = torch.arange(self._cached, self._cached + new.shape[1], device=self._device)
            arguments["position_ids"] = positions[None]  # (1, T)
        # Otherwise a prefill would compute logits of prompt x vocabulary.
        if self._has_logits_to_keep:
            count = new.shape[1]
            chosen = self._copies_head and keep < count and engine_forward(self.model) is None
            arguments["logits_to_keep"] = torch.arange(count - keep, count) if chosen else keep
        if self._reader is not None:
            arguments["output_hidden_states"] = True
        if self._encoder_ids is None:
            return arguments | {"input_ids": new}
        if self._encoded is None:
            return arguments | {"input_ids": self._encoder_ids, "decoder_input_ids": new}
        return arguments | {"encoder_outputs": self._encoded, "decoder_input_ids": new}

    def _empty_cache(self) -> Any:
        cache: Any = empty_cache(self.model)
        if self._encoder_ids is not None:
            # Self-attention and cross-attention. A crop shortens only the first, which is what a rewind needs.
            cache = EncoderDecoderCache(cache, empty_cache(self.model))
        if self._rewinds and not self._recurrent:
            cache.activate_past_recording()  # sliding windows keep what a rewind may need
        return cache

    def _cache_of(self, output: Any) -> Any:
        if self._cache_name not in output:
            raise self._no_cache()
        return output[self._cache_name]

    def _no_cache(self) -> UserError:
        return UserError(f"{self.name} returns no cache; turn the cache off (/cache off, use_cache=False).")

    def _upload(self, rows: list[list[int]]) -> Tensor:
        if self._device.type != "cuda":
            return torch.tensor(rows, device=self._device)
        # From pinned memory, so that the host need not wait until the GPU has finished what is queued.
        return torch.tensor(rows, pin_memory=True).to(self._device, non_blocking=True)


def _parameters(model: Any) -> set[str]:
    """The names of the arguments that a model takes. A wrapper that passes on any of them hides those of its class."""
    own = inspect.signature(model.forward).parameters
    passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in own.values())
    return {*own, *(inspect.signature(type(model).forward).parameters if passes_on else ())}

"""ModelSession: a model, what it has already computed for one run, and a way to take some of it back.

The decoders hand over whole contexts and lengths; the session alone knows what is cached, how caches are cropped, how encoder-decoder
models are called and which logits are needed. Cached and uncached sessions answer alike. It leaves probabilities to the processors and
tokens to the decoders. Every forward goes through `model(...)`.
"""

import copy
import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from utils.decode.generation_rules import TokenRules
from utils.decode.kv_cache import growing_cache
from utils.decode.recurrent import Retreat, check_fitness, is_recurrent
from utils.errors import NoRoom, UserError


def model_name(model: Any) -> str:
    """A name to call a model by in a sentence."""
    return str(getattr(model, "name_or_path", "") or getattr(model.config, "_name_or_path", "") or type(model).__name__)


def vocabulary_size(model: Any) -> int:
    """The width of the model's logits."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def context_length(model: Any) -> int | None:
    """The most positions the model takes, or None where it has no bound of its own (relative positions, recurrence)."""
    config = model.config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    return int(length) if isinstance(length, int) and length > 0 else None


def hidden_features(output: Any, layers: Sequence[int]) -> Tensor:
    """Of a model's output with hidden states those behind so many blocks, side by side, (B, T, F); -1 is the last, normed."""
    return torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)


def way_back(model: Any) -> str:
    """How the model's cache forgets drafts: "cropped", or "copied, and computed again"; nothing where it cannot."""
    try:
        session = ModelSession(model)
    except UserError:
        return ""
    return "copied, and computed again" if session._recurrent else "cropped"


def is_spread(model: Any) -> bool:
    """Whether accelerate keeps the model's layers on several devices."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1


class Session(Protocol):
    """What decoding by one token at a time asks of a model's session."""

    name: str
    vocab_size: int
    context_length: int | None

    def begin(self, prompt: list[int]) -> list[int]: ...

    def room(self, context: list[int]) -> int | None: ...

    def feed(self, context: list[int], keep: int) -> Tensor: ...

    def rewind(self, length: int) -> None: ...


class ModelSession:
    """One run's use of a model.

    model: a transformers causal or encoder-decoder model.
    use_cache: keep keys and values between feeds; without it every feed recomputes the whole context.
    rewinds: whether `rewind` will be called. A cache that cannot serve that is refused with a UserError before the first token.
    start_token: the decoder's first id where an encoder-decoder config names none.
    features: the hidden states to keep of every row fed, by the number of blocks behind them; -1 is the last, normed.
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
        self._use_cache, self._rewinds, self._start_token = use_cache, rewinds, start_token
        self._features = tuple(features)
        self._seen: tuple[Tensor, ...] = ()  # of the feeds since they were last taken
        self._device = model.device
        self._encoder_ids: Tensor | None = None
        self._encoded: BaseModelOutput | None = None
        self._cache: Any = None
        self._cached = 0  # positions of the context that the cache holds
        self._origin = 0  # context length at which the new tokens begin
        self._rules = TokenRules.of(model)
        self._retreat: Retreat | None = None
        parameters = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        if use_cache and self._cache_name not in parameters:
            raise self._no_cache()
        self._recurrent = use_cache and is_recurrent(model)
        # Some hybrid models would count the positions of every feed from 0.
        self._counts_positions = self._recurrent and "position_ids" in parameters
        if self._recurrent:
            check_fitness(model, lambda: copy.copy(self), windows=rewinds)
            self._retreat = Retreat() if rewinds else None

    def begin(self, prompt: list[int], others: Sequence[list[int]] = ()) -> list[int]:
        """The decoder's first context for these prompt ids. others: what an encoder reads for further rows, each as long as the prompt.

        Raises UserError for an empty prompt, foreign ids or no room for a token.
        """
        if not prompt:
            raise UserError("The prompt is empty: at least one token id is needed.")
        if not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            raise UserError(
                f"The prompt holds token ids outside 0..{self.vocab_size - 1}, the vocabulary of {self.name}: "
                "its tokenizer is another model's, or the prompt needs other words."
            )
        self._check_room(len(prompt))
        self._origin = 1 if self.model.config.is_encoder_decoder else len(prompt)
        if not self.model.config.is_encoder_decoder:
            return list(prompt)
        self._encoder_ids = self._upload([prompt, *others])
        sources = (getattr(self.model, "generation_config", None), self.model.config)
        named = (
            getattr(source, field, None) for field in ("decoder_start_token_id", "bos_token_id") for source in sources
        )
        return [next((start for start in named if start is not None), self._start_token)]

    @torch.no_grad()
    def read(self, prompt: list[int]) -> None:
        """Begin, and compute what every run of this prompt shares: all but its last token, or what the encoder makes of it."""
        before = self.begin(prompt)[:-1]
        if self._encoder_ids is not None:
            self._encoded = self.model.get_encoder()(self._encoder_ids, return_dict=True)
        elif before:
            self.feed(before, keep=1)

    def room(self, context: list[int]) -> int | None:
        """How many more tokens the model's context takes; None where it has no bound."""
        return None if self.context_length is None else self.context_length - len(context)

    def feed(self, context: list[int], keep: int) -> Tensor:
        """Logits (keep, V) behind the last `keep` tokens of the context, computing only what the cache lacks."""
        return self.feed_rows([context], keep)[0]

    @torch.no_grad()
    def feed_rows(self, contexts: list[list[int]], keep: int) -> Tensor:
        """Logits (B, keep, V) for B contexts of one length, as many as the session's cache holds rows."""
        known = len(contexts[0]) - keep
        if self._retreat is not None and self._retreat.is_due(keep):
            if self._cached < known:  # text that went with the state that was left
                self._computed([context[:known] for context in contexts], keep=1)
            self._retreat.keep(self._cache, self._cached)
        return self._computed(contexts, keep)

    def _computed(self, contexts: list[list[int]], keep: int) -> Tensor:
        length = len(contexts[0])
        new = [context[self._cached :] for context in contexts]
        output = self.model(**self._arguments(self._upload(new), keep))
        if self._use_cache:
            self._cache, self._cached = self._cache_of(output), length
        if self._features:
            self._seen = (*(self._seen if self._use_cache else ()), hidden_features(output, self._features)[0])
        if self._encoder_ids is not None and self._encoded is None:
            self._encoded = BaseModelOutput(last_hidden_state=output.encoder_last_hidden_state)
        return self._rules(output.logits[:, -keep:], length - keep + 1 - self._origin)

    def take_features(self) -> Tensor | None:
        """The hidden states (rows, F) of what was fed since they were last taken; None where none are kept."""
        seen, self._seen = self._seen, ()
        return torch.cat(seen) if seen else None

    def rewind(self, length: int) -> None:
        """Forget what lies behind the first `length` positions. At most once between two feeds; fine where less than that is held."""
        if not self._use_cache or self._cache is None:
            return
        if self._retreat is not None:
            self._cache, self._cached = self._retreat.rewound(self._cache, self._cached, length)
            return
        excess = max(self._cached - length, 0)
        self._cache.crop(-excess)  # also with 0: sliding windows are trimmed here
        self._cached -= excess

    def fork(self) -> "ModelSession":
        """A second session that goes on from here; neither sees what the other feeds or rewinds afterwards."""
        twin = copy.copy(self)
        twin._cache, twin._retreat = copy.deepcopy((self._cache, self._retreat))  # together: they share layers
        return twin

    def select(self, rows: list[int]) -> None:
        """Keep these rows of the cache, in this order, repeats allowed (beam search)."""
        index = torch.tensor(rows, device=self._device)
        if self._cache is not None:
            self._cache.reorder_cache(index)
        if self._encoded is not None:
            self._encoded = BaseModelOutput(last_hidden_state=self._encoded.last_hidden_state.index_select(0, index))

    def _arguments(self, new: Tensor, keep: int) -> dict[str, Any]:
        arguments: dict[str, Any] = {"use_cache": self._use_cache, "return_dict": True}
        if self._use_cache:
            arguments[self._cache_name] = self._cache if self._cache is not None else self._fresh_cache()
        if self._counts_positions:
            arguments["position_ids"] = torch.arange(self._cached, self._cached + new.shape[1], device=self._device)[
                None
            ]
        if self._keeps_logits:
            arguments["logits_to_keep"] = keep
        if self._features:
            arguments["output_hidden_states"] = True
        if self._encoder_ids is None:
            return arguments | {"input_ids": new}
        if self._encoded is None:
            return arguments | {"input_ids": self._encoder_ids, "decoder_input_ids": new}
        return arguments | {"encoder_outputs": self._encoded, "decoder_input_ids": new}

    def _fresh_cache(self) -> Any:
        cache: Any = growing_cache(self.model.config)
        if self._encoder_ids is not None:
            cache = EncoderDecoderCache(cache, growing_cache(self.model.config))
        if self._rewinds and not self._recurrent:
            cache.activate_past_recording()  # sliding windows keep what a rewind may need
        return cache

    def _cache_of(self, output: Any) -> Any:
        if self._cache_name not in output:
            raise self._no_cache()
        return output[self._cache_name]

    def _no_cache(self) -> UserError:
        return UserError(f"{self.name} hands out no cache; turn it off (/cache off, use_cache=False).")

    def _check_room(self, length: int) -> None:
        if self.context_length is None:
            return
        # The answer of an encoder-decoder model has a context of its own.
        most = self.context_length - (0 if self.model.config.is_encoder_decoder else 1)
        if length > most:
            raise NoRoom(
                f"The prompt has {length} tokens; {self.name} has a context of {self.context_length}, so a prompt may have at most {most}."
            )

    def _upload(self, rows: list[list[int]]) -> Tensor:
        return torch.tensor(rows, device=self._device)

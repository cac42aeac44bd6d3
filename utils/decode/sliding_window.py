"""Whether a model's cache may drop the tokens outside its sliding window.

The cache takes the window from the config, but the attention may not: a class that ignores `sliding_window` attends to
every token, and becomes a different model with a cache that drops some, without an error. So the logits with both
kinds of cache are compared with those without a cache, once per model, on its own weights.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from utils.decode.engine_forward import engine_forward
from utils.decode.kv_cache import new_cache
from utils.decode.logit_drift import largest_difference
from utils.decode.model_info import sample_ids
from utils.decode.session import Session

# During the comparison the window is narrowed to 3 tokens. A text longer than 4,096 tokens would take minutes.
WINDOW = 3
PASSES = (WINDOW, 1, 2)  # tokens per pass: a prefill, the decode step that drops the first token, a verify pass
LENGTH = sum(PASSES)
FIELDS = ("sliding_window", "attention_chunk_size")
MAX_RATIO = 4.0  # by rounding alone, one cache may move the logits this much further than the other

_keeps_all: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def keeps_all(model: Any) -> bool:
    """Whether the model's cache keeps all tokens although its config names a sliding window."""
    return _keeps_all.get(model, False)


def window_notes(model: Any, name: str) -> tuple[str, ...]:
    """A note for the user if `keeps_all`, or an empty tuple."""
    if not keeps_all(model):
        return ()
    return (f"{name}'s config names a sliding window that its attention does not use: the cache keeps all tokens",)


def empty_cache(model: Any) -> Any:
    """An empty cache for a model that `check_sliding_window` has seen: that of its engine, or a DynamicCache."""
    forward = engine_forward(model)
    own = forward.new_cache() if forward else None
    return new_cache(model.config, keeps_all=keeps_all(model)) if own is None else own


def check_sliding_window(model: Any, new_session: Callable[[bool], Session]) -> None:
    """Find out, once per model, whether its cache may drop tokens. Seven passes of at most six tokens.

    new_session: returns fresh sessions, with or without a cache. If in doubt the cache keeps all tokens: that costs
    memory, but is correct for every class.
    """
    if model in _keeps_all or engine_forward(model):  # an engine was tested with the cache that it brings
        return
    # The comparison would read all weights. How a model that stays in its files uses its windows is known.
    if getattr(model, "_in_files", False):
        return
    if not any(new_cache(model.config).is_sliding):
        _keeps_all[model] = False
        return
    try:
        with _narrowed(model):
            expected = _logits(new_session(False), (LENGTH,))
            # Set before the sessions are used: they read the kind of cache, and must not begin another check.
            _keeps_all[model] = False
            dropping = _difference(new_session(True), expected)
            _keeps_all[model] = True
            keeping = _difference(new_session(True), expected)
        one_ulp = torch.finfo(expected.dtype).eps * max(1.0, float(expected.amax(dim=-1).abs().max()))
        _keeps_all[model] = dropping > MAX_RATIO * max(keeping, one_ulp)
    except BaseException:
        _keeps_all.pop(model, None)
        raise


def _logits(session: Session, passes: tuple[int, ...]) -> Tensor:
    """Logits (LENGTH - WINDOW, V) of the positions that do not see the first token, by passes of these widths."""
    ids = sample_ids(LENGTH, session.vocab_size)
    # The decoder of an encoder-decoder model begins with a token of its own.
    context, fed, rows = [*session.begin(ids[:1]), *ids[1:]], 0, []
    for count in passes:
        fed += count
        rows.append(session.feed(context[:fed], keep=max(1, min(count, fed - WINDOW))))
    return torch.cat(rows)[WINDOW - LENGTH :]


def _difference(session: Session, expected: Tensor) -> float:
    """The largest difference of the logits with a cache from the expected ones."""
    try:
        logits = _logits(session, PASSES)
    except Exception:  # anything that a model's own code raises if keys are missing
        return inf
    return inf if logits.isnan().any() else largest_difference(logits, expected)


@contextmanager
def _narrowed(model: Any) -> Iterator[None]:
    """Narrow the window in the model's configs, and in the modules that hold a copy of it."""
    owners = {id(owner): owner for module in model.modules() for owner in (module, *_configs(module))}
    held = [
        (owner, name, value)
        for owner in owners.values()
        for name in FIELDS
        if type(value := vars(owner).get(name)) is int and value > WINDOW
    ]
    try:
        for owner, name, _ in held:
            setattr(owner, name, WINDOW)
        yield
    finally:
        for owner, name, value in held:
            setattr(owner, name, value)


def _configs(module: Any) -> Iterator[PreTrainedConfig]:
    for value in vars(module).values():
        if isinstance(value, PreTrainedConfig):
            yield from (value, value.get_text_config(decoder=True))

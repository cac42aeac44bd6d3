"""What is asked of a server, in the words of this program. An engine kind writes it in the words of its engine."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt as messages with a role and a content, which the server puts into its own chat template."""

    messages: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """One streamed completion.

    prompt: a text, token ids, or the messages of a chat. max_tokens: maximum number of new tokens. temperature: 0 is
    greedy. top_k: 0 means no limit. seed: of the sampling. ignore_eos: whether to continue after an end token, where
    the engine can. top_logprobs: for how many tokens of each position log-probabilities are wanted, where the engine
    gives them. reuses_prefix: whether the server may reuse what it computed for an earlier request.
    """

    prompt: str | tuple[int, ...] | Chat
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    top_logprobs: int = 0
    reuses_prefix: bool = False

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, Chat)

    @property
    def has_token_ids(self) -> bool:
        return isinstance(self.prompt, tuple)

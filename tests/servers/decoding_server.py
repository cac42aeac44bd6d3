"""A server of vLLM's kind that decodes with this program's own loop on tiny random models, with faults to plant."""

import json
import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from fakes import VOCABULARY, TinyPair, table_pair
from servers.loopback import Loopback, Received
from servers.loopback_values import Answer

from sampling import RULES, HeadDrafter, ModelDrafter, speculative_steps
from sampling.drafters.feature_sessions import feature_session
from utils.decode.decoding import Decoding
from utils.decode.drafts import Draft, Drafter, Verified
from utils.decode.model_session import ModelSession
from utils.decode.steps import Step
from utils.engine import Engine
from utils.logits_processor import GreedyProcessor, MultinomialProcessor
from utils.models.feature_drafter import FeatureDrafter

MODELS = '{"data": [{"id": "tiny", "owned_by": "vllm"}]}'


KNOWN: dict[Any, list[Step]] = {}  # the rounds of servers with the same models and requests


@cache
def noisy_pair() -> TinyPair:
    """A target and a copy of it with noise on the weights, whose drafts are often accepted."""
    pair = table_pair(max_position_embeddings=512, reads_all=True)
    pair.drafter, generator = deepcopy(pair.target), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in pair.drafter.parameters():
            noise = torch.randn(weight.shape, generator=generator) * weight.std(correction=0)
            weight.add_(0.2 * noise)
    pair.engine = Engine([pair.target, pair.drafter])
    return pair


class WindowSession(ModelSession):
    """A session of a model that reads only the last tokens of a context."""

    window = 64

    def feed(self, context: list[int], keep: int) -> torch.Tensor:
        return super().feed(context[-self.window :], keep)


@dataclass(frozen=True, slots=True)
class CliffDrafter:
    """A drafter whose drafts from position `cliff` on, counted from 0, are token 0."""

    inner: Drafter
    cliff: int

    def begin(self, prompt: list[int], context: list[int]) -> None:
        self.inner.begin(prompt, context)

    def propose(self, context: list[int], count: int) -> Draft:
        draft = self.inner.propose(context, count)
        tokens = [*draft.tokens[: self.cliff], *[0] * len(draft.tokens[self.cliff :])]
        probs = draft.probs
        if probs is not None:
            probs = probs.clone()
            probs[self.cliff :] = 0
            probs[self.cliff :, 0] = 1
        return replace(draft, tokens=tokens, probs=probs)

    def commit(self, context: list[int], verified: Verified) -> None:
        self.inner.commit(context, verified)


class FullDrafter(CliffDrafter):
    """A drafter whose context is full after `cliff` tokens."""

    def propose(self, context: list[int], count: int) -> Draft:
        return self.inner.propose(context, count if len(context) <= self.cliff else 0)


class EarlyDrafter(CliffDrafter):
    """A drafter that ends its drafts after the first even token."""

    def propose(self, context: list[int], count: int) -> Draft:
        draft = self.inner.propose(context, count)
        size = next((place + 1 for place, token in enumerate(draft.tokens) if token % 2 == 0), count)
        return replace(draft, tokens=draft.tokens[:size], probs=None if draft.probs is None else draft.probs[:size])


@dataclass(slots=True)
class DecodingServer(Loopback):
    """The server. `drafter` is that of the pair unless a test replaces it. `fault` is one of "", "off", "window",
    "cliff", "early", "full", "template", "chats without ids" and "greedy drafts". `others` are tokens of other clients
    during each answer; then the figures come from counters alone.
    `room` is the number of tokens after a long prompt that a full drafter still reads.
    """

    pair: Any = None
    drafter: Any = None
    fault: str = ""
    gamma: int = 3
    room: int = 0
    others: Callable[[int], int] | None = None
    counters: dict[str, int] = field(default_factory=dict)
    steps: dict[int, list[Step]] = field(default_factory=dict)
    busy_lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.drafter = self.pair.drafter if self.drafter is None else self.drafter
        self.pages |= {"/v1/models": (200, "application/json", MODELS), "/metrics": self._metrics}
        self.posted["/tokenize"] = lambda body: (200, "application/json", json.dumps({"tokens": self._ids(body)}))
        loopback: Loopback = self
        loopback.extras = self._figures

    def _ids(self, body: Any) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return list(prompt)
        tokenizer = self.pair.tokenizer
        if prompt is not None:
            return list(tokenizer(prompt, add_special_tokens=body.get("add_special_tokens", True))["input_ids"])
        ids = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=True)["input_ids"]
        return list(ids)

    def answer(self, body: Any) -> Answer:
        temperature, seed = body.get("temperature", 1.0), body.get("seed") or 0
        processor = MultinomialProcessor(temperature) if temperature else GreedyProcessor()
        decoding = Decoding.of(processor, int(body["max_tokens"]), end_ids=self.pair.end_ids, seed=seed)
        ids, gamma = self._ids(body), 0 if self.fault == "off" else self.gamma
        if self.fault == "chats without ids" and "messages" in body:
            del body["return_token_ids"]
        key = (
            self.pair.target,
            self.drafter,
            self.fault,
            self.room,
            gamma,
            temperature,
            seed,
            body["max_tokens"],
            *ids,
        )
        with self.busy_lock, torch.no_grad():  # the engine is not made for several threads
            if key not in KNOWN:
                layers = self.drafter.feature_layers if isinstance(self.drafter, FeatureDrafter) else ()
                target, drafter = ModelSession(self.pair.target, features=layers), self._drafter(decoding, len(ids))
                if self.fault == "template" and "messages" in body:
                    drafter = CliffDrafter(drafter, 0)
                options: Any = {"gamma": gamma, "first_target": True, "rule": RULES["rejection"]}
                KNOWN[key] = list(speculative_steps(ids, drafter, target, decoding, **options))
            made = KNOWN[key]
        tokens = [token for step in made for token in step.tokens]
        answer = Answer(len(ids), tokens, [f" w{token}" for token in tokens], "length")
        self.steps[id(answer)] = made
        return answer

    def _drafter(self, decoding: Decoding, prompt: int) -> Drafter:
        own = replace(decoding, processor=GreedyProcessor()) if self.fault == "greedy drafts" else decoding
        if isinstance(self.drafter, FeatureDrafter):
            return HeadDrafter(feature_session(self.drafter), own, VOCABULARY)
        windowed = self.fault == "window"
        session = (WindowSession if windowed else ModelSession)(self.drafter, use_cache=not windowed)
        made: Drafter = ModelDrafter(session, own, VOCABULARY)
        made = FullDrafter(made, max(100, prompt + self.room)) if self.fault == "full" else made
        made = EarlyDrafter(made, 0) if self.fault == "early" else made
        return CliffDrafter(made, 1) if self.fault == "cliff" else made

    def _figures(self, request: Received, answer: Answer) -> dict[str, Any]:
        steps = self.steps.pop(id(answer))
        drafting = [step for step in steps if step.drafted]
        counts = {
            "num_drafts": len(drafting),
            "num_draft_tokens": sum(len(step.drafted) for step in drafting),
            "num_accepted_tokens": sum(step.accepted for step in drafting),
            **{f"pos/{place}": sum(step.accepted > place for step in drafting) for place in range(self.gamma)},
            "generated": len(answer.ids) + (self.others(len(self.log)) if self.others else 0),
        }
        for name, count in counts.items():
            self.counters[name] = self.counters.get(name, 0) + count
        if self.others is not None or self.fault == "off":
            return {}
        own = {
            "num_draft_tokens": counts["num_draft_tokens"],
            "num_accepted_draft_tokens": counts["num_accepted_tokens"],
            "num_spec_steps": len(drafting),
            "per_step_drafted": [len(step.drafted) for step in drafting],
            "per_step_accepted": [step.accepted for step in drafting],
        }
        return {"metrics": {"speculative_decoding": own}}

    def _metrics(self) -> tuple[int, str, str]:
        lines = [f"vllm:generation_tokens_total {self.counters.get('generated', 0)}"]
        if self.fault != "off":
            for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
                lines.append(f"vllm:spec_decode_{name}_total {self.counters.get(name, 0)}")
            for place in range(self.gamma):
                label = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}}'
                lines.append(f"{label} {self.counters.get(f'pos/{place}', 0)}")
        return 200, "text/plain", "\n".join(lines) + "\n"

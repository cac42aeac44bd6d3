"""The loaded pairs, the processes of the peers, and what is measured with them."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import peers
import probes
import report
import torch
from arms import MIN_RATE_TOKENS, NGRAM_DRAFTS, PLAIN, STORAGE, TARGET, Arm, Run, our_arms

from utils.comparison.records import versions
from utils.engine.machine import machine_facts
from utils.engine.machine_code import cpu_features
from utils.pairs.load_pair import load_pair
from utils.pairs.pair import Pair
from utils.pairs.request import PairRequest
from utils.prompts.conversation import prompt_ids
from utils.screen.renderer import Renderer

TRIAL_PROMPT = "Tell me about the sea."
CUT = "layers:10"  # the assistant of `generate` if the drafter is not a model
OCCASIONALLY = 4  # our arms in the plain engine run on the first of so many prompts
INSTRUCTION_SETS = (
    "avx2",
    "avxvnni",
    "avx512f",
    "avx512vnni",
    "avx512bf16",
    "amx-int8",
    "neon",
    "i8mm",
    "sve",
)  # of LLVM


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the arms run on.

    ours, plain: the pair in the engine to measure, and in the plain engine. threads: of PyTorch with these two.
    """

    ours: Pair
    plain: Pair
    threads: tuple[int, int]
    generate: peers.Peer
    llama: peers.Peer | None

    def close(self) -> None:
        """End the processes of the peers."""
        for peer in (self.generate, self.llama):
            if peer is not None:
                peer.close()


def load(flags: argparse.Namespace, screen: Renderer, found: dict[str, str]) -> Loaded:
    """Load the pairs and start the peers. found: the environment before the benchmark changed it."""
    ours = load_pair(
        PairRequest("embedded", flags.drafter, device="cpu", engine_weights=flags.engine_weights), screen.note
    )
    screen.note(f"starting the engine {flags.engine} ...")
    ours.engine.use(flags.engine, 0)
    threads = torch.get_num_threads()  # an engine may have others of its own
    plain = load_pair(PairRequest("embedded", flags.drafter, device="cpu"), screen.note)
    plain.engine.use("plain", 0)
    screen.note("starting generate and llama.cpp, and trying how their threads are fastest ...")
    ids = prompt_ids(ours.tokenizer, TRIAL_PROMPT, chat=True, system=None)
    assistant = flags.drafter if hasattr(ours.drafter, "generate") else CUT
    generate = peers.start_generate(("embedded", assistant, generate_format(flags.engine_weights)), found, ids)
    try:
        llama = peers.start_llama(found, ids, screen.note)
    except BaseException:
        generate.close()
        raise
    return Loaded(ours, plain, (threads, plain.engine.state.threads), generate, llama)


def generate_format(engine_weights: str) -> str:
    """The number format of `generate`: ours if it can compute it, otherwise float32."""
    return engine_weights if engine_weights in ("float32", "bfloat16") else "float32"


class Bench:
    """What is measured with the loaded pairs and peers."""

    def __init__(self, flags: argparse.Namespace, screen: Renderer, loaded: Loaded) -> None:
        self._flags, self._screen, self._loaded = flags, screen, loaded
        self._ours, self._plain = loaded.ours, loaded.plain
        lines = flags.prompts.read_text(encoding="utf-8").splitlines()
        self._prompts = [json.loads(line) for line in lines if line.strip()]
        self._arms = self._make_arms()
        self._setting = self._describe()

    def measure(self) -> dict[str, Any]:
        """The setting and every part that the flags ask for."""
        self._screen.result(f"{self._setting['engine']}; {self._setting['cpu']}, {self._setting['cores']} cores")
        for name, how in self._setting["peers"].items():
            self._screen.result(f"{name}: {how}")
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "texts": self._texts,
            "long": self._long,
            "verify": self._verify,
            "perplexity": self._perplexity,
            "memory": self._memory,
        }
        result: dict[str, Any] = {"setting": self._setting}
        for name in self._flags.parts:
            if name != "texts":
                self._screen.note(f"measuring {name} ...")
            try:
                result |= parts[name]()
            except peers.PeerFailed as error:
                self._screen.note(f"{name}: not measured, because a peer failed ({error})")
        return result

    def _make_arms(self) -> list[Arm]:
        ours, llama = self._ours, self._loaded.llama
        arms = our_arms(ours, self._loaded.threads[0])
        if ours.engine.state.kind != "plain" and self._flags.engine_weights == "float32":
            arms += our_arms(self._plain, self._loaded.threads[1], PLAIN, every=OCCASIONALLY)
        arms += peers.generate_arms(self._loaded.generate)
        arms += peers.llama_arms(llama) if llama else []
        return [arm for arm in arms if arm.name not in self._flags.skip or arm.name == TARGET]

    def _describe(self) -> dict[str, Any]:
        facts, features, state = machine_facts(), cpu_features(), self._ours.engine.state
        weights = self._flags.engine_weights
        started = {"generate": self._loaded.generate, "llama.cpp": self._loaded.llama}
        return {
            "engine": state.sentence(),
            "formats": {"ours": weights, "generate": generate_format(weights)},
            "weight_bytes": self._ours.engine.nbytes(),
            "engines": self._ours.engine.figures(),
            "threads": {arm.name: arm.threads for arm in self._arms},
            "peers": {name: str(peer) for name, peer in started.items() if peer is not None},
            "cpu": facts["cpu"],
            "instruction_sets": [name for name in INSTRUCTION_SETS if name in features],
            "avx2_only": "avx2" in features and "avx512f" not in features,
            "cores": facts["cores"] or facts["threads"],
            "versions": versions() | dict(_other_versions("llvmlite", "xllamacpp")),
            "new_tokens": self._flags.tokens,
            "repeats": self._flags.repeats,
            "drafter": self._flags.drafter,
            "ngram_drafts": NGRAM_DRAFTS,
            "ngram_storage": str(STORAGE),
        }

    def _ids(self, prompt: dict[str, Any]) -> list[int]:
        """The token ids of a prompt in the chat template."""
        return prompt_ids(self._ours.tokenizer, prompt["prompt"], chat=True, system=None)

    def _texts(self) -> dict[str, Any]:
        """Every arm on every prompt."""
        for arm in self._arms:
            arm.run(self._ids(self._prompts[0]), 2 * MIN_RATE_TOKENS)  # warm-up
        texts = [self._text(number, prompt) for number, prompt in enumerate(self._prompts)]
        return {"texts": texts, "ratios": report.ratios(texts)}

    def _text(self, number: int, prompt: dict[str, Any]) -> dict[str, Any]:
        """The arms that run on this prompt, in turns; a different one begins each time."""
        ids = self._ids(prompt)
        arms = [arm for arm in self._arms if number % arm.every == 0]
        runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}
        for repeat in range(self._flags.repeats):
            for index in range(len(arms)):
                arm = arms[(index + repeat + number) % len(arms)]
                runs[arm.name].append(arm.run(ids, self._flags.tokens))
        reference = runs[TARGET][0].tokens or []
        text = self._ours.tokenizer.decode(reference, skip_special_tokens=True)
        cells = {name: cell(repeats, reference, text) for name, repeats in runs.items()}
        rates = ", ".join(f"{name} {_shown(each['decode'])}" for name, each in cells.items())
        self._screen.result(f"{prompt['task']} ({len(ids)} + {len(reference)} tokens): {rates} tokens/s")
        return {"task": prompt["task"], "prompt_tokens": len(ids), "new_tokens": len(reference), "arms": cells}

    def _long(self) -> dict[str, Any]:
        arms = [arm for arm in self._arms if arm.name in (TARGET, peers.GENERATE)]
        lengths = {length: rounds * self._flags.repeats for length, rounds in probes.LONG_PROMPTS.items()}
        return {"long_prompts": probes.long_prompts(arms, self._passage(), lengths)}

    def _verify(self) -> dict[str, Any]:
        """Verify costs, and how near a decode step is to the limit of the memory."""
        ours, plain = self._loaded.threads
        models = {"ours": (self._ours.target, ours), "plain engine": (self._plain.target, plain)}
        seconds = probes.verify_seconds(models, probes.VERIFY_ROUNDS * self._flags.repeats)
        size, step = probes.bytes_per_step(self._ours, self._plain.target), median(seconds["ours"][1])
        read = probes.read_seconds(size, self._ours.engine.state.threads)
        peak = {"bytes": size, "read_seconds": read, "step_seconds": step, "share": read / step}
        result = {"verify_seconds": seconds, "roofline": peak}
        products = probes.step_over_products(self._ours.target, ours, probes.PRODUCT_ROUNDS * self._flags.repeats)
        return result | ({"step_over_products": products} if products else {})

    def _perplexity(self) -> dict[str, Any]:
        """Of every number format that the arms compute."""
        ids, formats = self._passage(), self._setting["formats"]
        torch.set_num_threads(self._loaded.threads[0])
        found = {"float32": probes.perplexity(self._plain.target, ids)}
        if formats["ours"] != "float32":
            found[f"ours ({formats['ours']})"] = probes.perplexity(self._ours.target, ids)
        if self._loaded.llama is not None:
            found["llama.cpp (Q4_1)"] = self._loaded.llama.ask("perplexity", ids=ids)["perplexity"]
        return {"perplexity": found}

    def _memory(self) -> dict[str, Any]:
        """Of the program. With repeats it starts twice, because a first start on a machine measures the engines."""
        options = ("--engine", self._flags.engine, "--engine-weights", self._flags.engine_weights)
        first = {"first_start": probes.program(*options)} if self._flags.repeats > 1 else {}
        return first | {"program": probes.program(*options)}

    def _passage(self) -> list[int]:
        return list(self._ours.tokenizer(probes.PASSAGE.replace("\n", " "))["input_ids"])


def cell(runs: Sequence[Run], reference: list[int], text: str) -> dict[str, Any]:
    """The rates of an arm by repeat, and whether it always generated the reference: by ids, or else by text."""
    same = [run.text == text if run.tokens is None else run.tokens == reference for run in runs]
    return {
        "decode": [run.decode_rate for run in runs],
        "whole": [run.rate for run in runs],
        "first_seconds": [run.first_seconds for run in runs],
        "same_text": all(same),
    }


def _shown(rates: Sequence[float | None]) -> str:
    found = [rate for rate in rates if rate]
    return f"{median(found):.1f}" if found else "-"


def _other_versions(*names: str) -> Iterator[tuple[str, str]]:
    for name in names:
        with suppress(PackageNotFoundError):
            yield name, version(name)

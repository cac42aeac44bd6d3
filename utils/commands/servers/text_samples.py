"""Sampled texts of a server and of its baseline: are they of one distribution?

Speculation must not change the distribution of a sampled text, and no two texts need be equal. So many texts of both
servers are compared as samples. All requests have different random numbers.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from utils.bounds import MAX_SEED
from utils.commands.servers.text_trials import Output, ask_together, unique
from utils.comparison.reports import Finding, Progress, ReportEvent
from utils.config.setting_table import setting_fields
from utils.config.settings import Settings
from utils.metrics.two_samples import compare_samples
from utils.servers.connection import Connection
from utils.servers.request import ServerRequest
from utils.text import count_of

SAMPLED = "sampled"
LENGTH = 16  # tokens; later ones follow contexts that are all different
SIGNIFICANT = 0.01


@dataclass(frozen=True, slots=True)
class SampleTrial:
    """What is compared. servers: the baseline and the server. requests: the greedy ones of each, one for each prompt.
    samples: of each prompt from each server. concurrency: requests at the same time.
    """

    servers: tuple[Connection, Connection]
    requests: dict[str, list[ServerRequest]]
    samples: int
    concurrency: int
    settings: Settings


def sample_events(trial: SampleTrial) -> Iterator[ReportEvent]:
    """Ask both servers, prompt by prompt, and compare their texts."""
    names = [connection.address.name for connection in trial.servers]
    prompts = len(trial.requests[names[0]])
    outputs: dict[str, list[list[Output]]] = {name: [] for name in names}
    for number in range(prompts):
        yield Progress(f"sampled texts: prompt {number + 1} of {prompts}, {trial.samples} of each server ...")
        for place, connection in enumerate(trial.servers):
            name = connection.address.name
            requests = _requests(trial, trial.requests[name][number], 2 * number + place)
            outputs[name].append(ask_together(connection, requests, trial.concurrency))
    compared = compare_samples(
        [_texts(*pair) for pair in zip(outputs[names[0]], outputs[names[1]], strict=True)], trial.settings.seed
    )
    for name in names:
        figures: dict[str, Any] = {
            "check": SAMPLED,
            "server": name,
            "prompts": prompts,
            "requests": prompts * trial.samples,
            "samples": trial.samples,
            "unique_texts": max(map(unique, outputs[name])),
            "tokens": _length(trial),
            "processor": setting_fields()["processor"].show(trial.settings),
            "shared_within": compared.shared_within,
            "shared_between": compared.shared_between,
            "p_value": compared.p_value,
        }
        cause = "-" if name == names[0] else f"p = {compared.p_value:.2g}"
        cells = (SAMPLED, name, str(figures["requests"]), str(figures["unique_texts"]), "-", "-", "-", cause)
        yield Finding(cells, figures)


def sampled_conclusion(name: str, baseline: str, findings: Sequence[Finding]) -> list[str]:
    """What the comparison says; empty if there was none."""
    row = next(
        (one.figures for one in findings if (one.figures["check"], one.figures["server"]) == (SAMPLED, name)), None
    )
    if row is None:
        return []
    texts = f"{row['samples']} texts of up to {row['tokens']} tokens from each for {count_of(row['prompts'], 'prompt')}"
    about = f"({row['processor']}; permutation test, p = {row['p_value']:.2g}; {texts})"
    if row["p_value"] > SIGNIFICANT:
        return [
            f"No difference was found between the distributions of sampled texts of {name} and {baseline} {about}. "
            "Smaller differences need a larger samples=."
        ]
    return [
        f"The sampled texts of {name} do not have the distribution of those of {baseline} {about}: two texts of "
        f"{baseline} share {row['shared_within']:.1f} first tokens on average, one of each server "
        f"{row['shared_between']:.1f}. Check that both servers have the same weights and sampling defaults; if so, "
        "report it to the engine's authors."
    ]


def _length(trial: SampleTrial) -> int:
    return min(LENGTH, trial.settings.length)


def _requests(trial: SampleTrial, greedy: ServerRequest, block: int) -> list[ServerRequest]:
    processor = trial.settings.processor
    first = trial.settings.seed + 1 + block * trial.samples
    return [
        replace(
            greedy,
            max_tokens=_length(trial),
            temperature=processor.effective_temperature,
            top_k=processor.top_k or 0,
            top_p=1.0 if processor.top_p is None else processor.top_p,
            seed=(first + number) % (MAX_SEED + 1),
        )
        for number in range(trial.samples)
    ]


def _texts(
    ours: Sequence[Output], theirs: Sequence[Output]
) -> tuple[list[Sequence[Hashable]], list[Sequence[Hashable]]]:
    """Token ids if both servers give them, otherwise words."""
    by_ids = all(output.token_ids is not None for output in (*ours, *theirs))

    def of(output: Output) -> Sequence[Hashable]:
        return (output.token_ids or ()) if by_ids else output.text.split()

    return [of(output) for output in ours], [of(output) for output in theirs]

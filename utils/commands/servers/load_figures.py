"""What /server load has measured: cells of servers or draft lengths and loads, their tables and sentences, the best
draft length of each load, and the records of requests.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import ceil, isfinite
from statistics import fmean
from typing import Any

from utils.commands.experiments.races import OTHER_REASON
from utils.commands.shared.result_tables import ACCEPTANCE, NOTHING, ResultColumn, ResultTable, Row, figure, marked
from utils.comparison.speed_claims import (
    FASTER,
    MIN_VALUES,
    NOT_DISTINGUISHABLE,
    SLOWER,
    TOO_FEW,
    claim_text,
    interval_text,
    reasons_unknown,
    rough,
    server_notes,
    speed_claim,
    speedup_text,
    star,
)
from utils.servers.address import ServerAddress, other_machine
from utils.servers.kinds.completion import ServerAcceptance
from utils.servers.load_slice import MOST_CLIENTS, LoadRequest, LoadSlice, sum_of_drafts
from utils.servers.processes.flags import Speculation, settings_elsewhere

SHARES = (0.5, 0.9, 0.99)  # percentiles of times
NO_BASELINE = "Nothing to compare with: a server that was added with baseline=NAME is measured beside that one."
SAMPLE = "Turns of one measurement share the state of the machine, so an interval may be too narrow."
COUNTED = "The server counts no tokens, so it has no throughput."
MORE_TURNS = f"Fewer than {MIN_VALUES} turns do not tell a difference from noise: turns={MIN_VALUES} does."
TURNS_MISSING = f"Fewer than {MIN_VALUES} turns of both were measured, which do not tell a difference from noise."
SAVED_NOTHING = "No draft was accepted, so drafts cannot have made it faster."
STOPS = "Speculation stops paying between {} and {} requests {}."
NO_GAIN = "With more than {} {}, neither a gain nor a loss was measured."
FIXED = "End tokens were ignored (fixed=). Texts repeat themselves after their end, so drafts are accepted more often."
BY_POSITION = "{}, {}: of drafts at position 1, 2, ... these shares were accepted: {}."
NO_WINNER = "{}: no length is measurably faster than all others; {} is the shortest that is not measurably slower{}."
VERBS = {
    FASTER: "is faster than",
    SLOWER: "is slower than",
    NOT_DISTINGUISHABLE: "is not distinguishable from",
    TOO_FEW: "was measured beside",
}
ANSWER = {  # fields of the record of a request, and attributes of its answer
    "first_token_seconds": "first_seconds",
    "seconds": "seconds",
    "prompt_tokens": "prompt_tokens",
    "new_tokens": "token_count",
    "finish": "finish",
}


@dataclass(frozen=True, slots=True)
class Load:
    """So many requests at once in a closed loop, or, if `is_rate`, so many arrivals a second."""

    value: float
    is_rate: bool = False

    @classmethod
    def of(cls, row: Row) -> "Load":
        return cls(row["concurrency"] or row["rate"], is_rate=row["rate"] is not None)

    @property
    def figures(self) -> dict[str, float | None]:
        return {"concurrency": None if self.is_rate else int(self.value), "rate": self.value if self.is_rate else None}

    @property
    def unit(self) -> str:
        return "a second" if self.is_rate else "at once"

    @property
    def clients(self) -> int:
        return MOST_CLIENTS if self.is_rate else int(self.value)

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit}"


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """Limits in seconds for the time to the first token and per further token. A request within them is goodput."""

    first_token: float | None = None
    per_token: float | None = None

    def __str__(self) -> str:
        named = (("ttft", self.first_token), ("tpot", self.per_token))
        return " and ".join(f"{name}={1000 * value:g}ms" for name, value in named if value is not None)

    def are_met(self, request: LoadRequest) -> bool:
        first = None if request.completion is None else request.completion.first_seconds
        if first is None or first > (self.first_token or first):
            return False
        each = request.token_seconds or 0.0
        return each <= (self.per_token or each)


@dataclass(slots=True)
class LoadCell:
    """One server at one load, with its measurements by turn, of which `turns` were planned. `draft` is its draft length
    if several are compared.
    """

    load: Load
    address: ServerAddress
    turns: int
    limits: LatencyLimits = LatencyLimits()
    is_fixed: bool = False
    draft: int | None = None
    slices: dict[int, LoadSlice] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float | None:
        counted = [one for one in self.slices.values() if one.tokens is not None]
        seconds = sum(one.seconds for one in counted)
        return sum(one.tokens or 0 for one in counted) / seconds if seconds else None

    @property
    def baseline(self) -> str:
        """The label of the arm that it is compared with, or empty."""
        if self.draft is None:
            return self.address.baseline or ""
        return _length(0) if self.draft else ""

    def speed(self, turn: int) -> float | None:
        """Tokens per second in one turn. At a given rate of arrivals, only the time of each request tells a speed."""
        measured = self.slices.get(turn)
        return None if measured is None else measured.speed(of_requests=self.load.is_rate)

    def figures(self, baseline: "LoadCell | None") -> dict[str, Any]:
        """The row of the cell, with the speed-up over the baseline in the same turns."""
        slices = list(self.slices.values())
        requests = [request for one in slices for request in one.requests]
        done = [one.completion for one in requests if one.completion is not None]
        others = [] if baseline is None else [one.other_tokens for one in baseline.slices.values()]
        ratios = [] if baseline is None else list(_ratios(self, baseline))
        drafts = self._draft_figures(slices)
        seconds = sum(one.seconds for one in slices)
        within = sum(map(self.limits.are_met, requests)) if str(self.limits) else None
        return {
            "server": self.address.name,
            "draft": self.draft,
            "baseline": self.baseline if baseline is not None else None,
            "not_compared": other_machine(self.address, baseline.address) if baseline is not None else "",
            **self.load.figures,
            "turns": self.turns,
            "fixed": self.is_fixed,
            "requests": len(done),
            "failed": len(requests) - len(done),
            "seconds": [one.seconds for one in slices],
            "tokens": [one.tokens for one in slices],
            "tokens_per_second": self.tokens_per_second,
            "first_token_seconds": _percentiles([one.first_seconds for one in done]),
            "token_seconds": _percentiles([one.token_seconds for one in requests]),
            "request_seconds": _percentiles([one.seconds for one in done]),
            "limits": str(self.limits),
            "within_limits": within,
            "goodput": within / seconds if within is not None and seconds else None,
            **drafts,
            "other_tokens": [one.other_tokens for one in slices],
            "disturbed": any(one.other_tokens for one in slices) or any(others),
            "speedups": ratios,
            **speed_claim([ratios], tokens_per_forward=1.0 if self.saved_nothing else None),
        }

    @property
    def saved_nothing(self) -> bool:
        """Whether it drafted, and no draft was accepted, so that drafts cannot have made it faster."""
        drafts = self._draft_figures(list(self.slices.values()))
        return bool(drafts["drafted"]) and not drafts["accepted"]

    def _draft_figures(self, slices: Sequence[LoadSlice]) -> dict[str, Any]:
        """The drafts of all turns. If they are unknown in one turn, they are unknown."""
        found = sum_of_drafts([(one.acceptance, one.tokens) for one in slices])
        drafts = found if found is not None and found.valid else ServerAcceptance(0, 0, valid=False)
        tokens = [one.tokens or 0 for one in slices]
        return {
            "drafted": drafts.drafted if drafts.valid else None,
            "accepted": drafts.accepted if drafts.valid else None,
            "tokens_per_target_forward": sum(tokens) / drafts.forwards if drafts.forwards and all(tokens) else None,
            "accepted_by_position": [list(pair) for pair in drafts.by_position] if drafts.valid else None,
            "acceptance_notes": [drafts.note] if drafts.note else [],
            "acceptance_unknown": reasons_unknown(one.acceptance for one in slices),
        }

    def request_records(self) -> Iterator[dict[str, Any]]:
        for turn, measured in self.slices.items():
            for one in measured.requests:
                yield {
                    "server": self.address.name,
                    "draft": self.draft,
                    **self.load.figures,
                    "turn": turn + 1,
                    "request": one.number + 1,
                    "sent_seconds": one.sent,
                    **{name: getattr(one.completion, attribute, None) for name, attribute in ANSWER.items()},
                    "token_seconds": one.token_seconds,
                    **{name: getattr(one.acceptance, name, None) for name in ("drafted", "accepted")},
                    "within_limits": self.limits.are_met(one) if str(self.limits) else None,
                    "error": one.error,
                }


def load_rows(cells: Mapping[tuple[Load, str], LoadCell]) -> Iterator[dict[str, Any]]:
    for (load, _), cell in cells.items():
        if cell.slices:
            same = [one for (other, _), one in cells.items() if other == load and one.slices and not one.saved_nothing]
            choice = {} if cell.draft is None else _choice(cell, same)
            yield cell.figures(cells.get((load, cell.baseline))) | choice


def _choice(cell: LoadCell, cells: Sequence[LoadCell]) -> dict[str, bool | None]:
    """Whether a draft length is measurably faster than all others at its load, and whether it is the shortest that is
    not measurably slower than the fastest. None with too few turns.
    """
    best = max(cells, key=lambda one: fmean([one.speed(turn) or 0.0 for turn in one.slices]), default=cell)
    found = {one.draft or 0: speed_claim([list(_ratios(best, one))])["verdict"] for one in cells if one is not best}
    if not found or {TOO_FEW, "-"} & set(found.values()):
        return {"fastest": None, "advised": None}
    as_fast = [best.draft or 0, *(draft for draft, verdict in found.items() if verdict != FASTER)]
    return {"fastest": cell is best and set(found.values()) == {FASTER}, "advised": cell.draft == min(as_fast)}


def _length(draft: int) -> str:
    return f"draft={draft}"


def _label(row: Row) -> str:
    """What distinguishes the rows of one load."""
    return row["server"] if row.get("draft") is None else _length(row["draft"])


def _percentiles(values: Sequence[float | None]) -> list[float] | None:
    """The smallest values that are at least as large as these shares of all values (nearest rank)."""
    known = sorted(value for value in values if value is not None)
    return [known[ceil(share * len(known)) - 1] for share in SHARES] if known else None


def _ratios(cell: LoadCell, baseline: LoadCell) -> Iterator[float]:
    """The speed over the baseline's, turn by turn, if their machines can be compared."""
    if other_machine(cell.address, baseline.address):
        return
    for turn in cell.slices:
        ours, theirs = cell.speed(turn), baseline.speed(turn)
        if ours and theirs and isfinite(ratio := ours / theirs):
            yield ratio


def _times(heading: str, key: str, *, drop: int = 0) -> ResultColumn:
    def shown(row: Row) -> str:
        values = row[key]
        return NOTHING if values is None else f"{'/'.join(f'{1000 * value:.0f}' for value in values)} ms"

    return ResultColumn(heading, shown, drop)


def _requests_text(row: Row) -> str:
    sent = row["requests"] + row["failed"]
    return f"{row['requests']} of {sent}" if row["failed"] else str(sent)


def load_table(limits: LatencyLimits) -> ResultTable:
    return ResultTable(
        ResultColumn("load", lambda row: str(Load.of(row))),
        ResultColumn("server", _label),
        marked(figure("tokens/s", "tokens_per_second", "{:.1f}")),
        _times("first token", "first_token_seconds", drop=5),
        _times("per token", "token_seconds"),
        _times("request", "request_seconds", drop=2),
        *([figure("goodput", "goodput", "{:.2f}/s")] if str(limits) else []),
        replace(ACCEPTANCE, drop=4),
        figure("tokens/forward", "tokens_per_target_forward", "{:.2f}", drop=3),
        ResultColumn("speed-up", speedup_text),
        ResultColumn("95 % interval", lambda row: interval_text(row["interval"])),
        ResultColumn("requests", _requests_text, drop=1),
    )


def conclusion(rows: Sequence[Row]) -> list[str]:
    """The loads at which the server is faster than its baseline, and those at which it is not."""
    lines = [COUNTED] if any(row["tokens_per_second"] is None for row in rows) else []
    compared = [row for row in rows if row["speedups"]]
    if rows[0].get("draft") is not None:
        lines += _best_lengths(rows)
    elif compared:
        lines += _comparison(compared)
    elif all(row["baseline"] is None for row in rows):
        lines.append(NO_BASELINE)
    lines += dict.fromkeys(row["not_compared"] for row in rows if row["not_compared"])
    for row in rows:
        if rates := [f"{accepted / tried:.2f}" for accepted, tried in row.get("accepted_by_position") or ()]:
            lines.append(BY_POSITION.format(_label(row), Load.of(row), " ".join(rates)))
    lines += [f"Acceptance: {note}." for note in dict.fromkeys(chain(*(row["acceptance_notes"] for row in rows)))]
    for name in dict.fromkeys(map(_label, rows)):
        own = [row for row in rows if _label(row) == name]
        limited = {key: [*chain(*(row[key] for row in own))] for key in ("other_tokens", "acceptance_unknown")}
        lines += dict.fromkeys(server_notes(name, limited, "turn"))
    lines += [FIXED] * rows[0]["fixed"]
    lines += [f"Goodput counts the requests a second with {rows[0]['limits']}."] * bool(rows[0]["limits"])
    if not compared:
        return lines
    if all(row["verdict"] != TOO_FEW for row in compared):
        return [*lines, SAMPLE]
    return [*lines, MORE_TURNS if rows[0]["turns"] < MIN_VALUES else TURNS_MISSING]


def _best_lengths(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence for each load: the fastest draft length where the intervals say so."""
    for load in dict.fromkeys(map(Load.of, rows)):
        own = [row for row in rows if Load.of(row) == load]
        gain = {row["draft"]: f", {claim_text(row)}" if row["speedup"] else "" for row in own}
        fastest = next((row["draft"] for row in own if row["fastest"]), None)
        advised = next((row["draft"] for row in own if row["advised"]), None)
        if advised is None:
            best = max(own, key=lambda row: row["speedup"] or float(row["draft"] == 0))
            about = f", about {rough(best['speedup'])}{star(best)} {best['baseline']}" if best["speedup"] else ""
            yield f"{load}: too little was measured to tell; the highest is {_label(best)}{about}."
        elif fastest is None:
            yield NO_WINNER.format(load, _length(advised), gain[advised])
        else:
            yield f"{load}: {_length(fastest)} is the fastest{gain[fastest]}."
    unknown = (row for row in rows if row["fastest"] and row["draft"] and not row["drafted"])
    yield from dict.fromkeys(OTHER_REASON.format(_label(row)) for row in unknown)


def load_settings(rows: Sequence[Row], started: Speculation | None) -> list[str]:
    """The settings of other programs for what was found, if drafts pay. `started` is how the server drafts."""
    if started is None:
        return []
    if rows[0].get("draft") is None:
        gains = any(row["verdict"] == FASTER and row["drafted"] for row in rows)
        return settings_elsewhere(started) if gains else []
    schedule = draft_schedule(rows)
    longest = max((drafts for _, _, drafts in schedule), default=0)
    if not longest:
        return []
    found = replace(started, drafts=longest, schedule=schedule if len(schedule) > 1 else ())
    return settings_elsewhere(found)


def draft_schedule(rows: Sequence[Row]) -> tuple[tuple[int, int, int], ...]:
    """(first, last, drafts) for numbers of concurrent requests, from the advised draft lengths.

    Between two measured loads the length of the lower one is kept. There is none if a load has no advice, or if the
    advice differs between rates of arrivals.
    """
    advised = [(Load.of(row), int(row["draft"])) for row in rows if row["advised"]]
    differ = len({drafts for _, drafts in advised}) > 1
    if len(advised) < len(set(map(Load.of, rows))) or (differ and advised[0][0].is_rate):
        return ()
    found: list[tuple[int, int, int]] = []
    for index, (load, drafts) in enumerate(advised):
        last = int(advised[index + 1][0].value) - 1 if index + 1 < len(advised) else int(load.value)
        if found and found[-1][2] == drafts:
            found[-1] = (found[-1][0], last, drafts)
        else:
            found.append((found[-1][1] + 1 if found else 1, last, drafts))
    return tuple(found)


def _comparison(rows: Sequence[Row]) -> list[str]:
    """A sentence for each verdict with its loads, and what limits them."""
    lines, server, unit = list[str](), rows[0]["server"], Load.of(rows[0]).unit
    for verdict, verb in VERBS.items():
        about = "about " if verdict == TOO_FEW else ""
        loads = [f"{Load.of(row).value:g} ({about}{speedup_text(row)})" for row in rows if row["verdict"] == verdict]
        if loads:
            baseline = rows[0]["baseline"]
            lines.append(f"{server} {verb} {baseline} with this many requests {unit}: {', '.join(loads)}.")
    lines += _crossing(rows)
    if any(row["verdict"] == FASTER and not row["drafted"] for row in rows):
        lines.append(OTHER_REASON.format(server))
    return [*lines, SAVED_NOTHING] if all(row["drafted"] and not row["accepted"] for row in rows) else lines


def _crossing(rows: Sequence[Row]) -> list[str]:
    """The loads between which speculation stops paying: the highest one with a gain and the next one with a loss.

    A load with neither shows no loss, so it gets a sentence of its own.
    """
    last = max((index for index, row in enumerate(rows) if row["verdict"] == FASTER), default=None)
    if last is None:
        return []
    later = [row for row in rows[last + 1 :] if row["verdict"] != TOO_FEW]
    slower = next((row for row in later if row["verdict"] == SLOWER), None)
    load = Load.of(rows[last])
    if slower is not None:
        return [STOPS.format(f"{load.value:g}", f"{Load.of(slower).value:g}", load.unit)]
    return [NO_GAIN.format(f"{load.value:g} request{'s' * (load.value != 1)}", load.unit)] if later else []

"""Figures of Spec-Bench and SPEED-Bench for servers: by hand, and in the report of /race with a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, records_of
from servers.loopback import Faults, Loopback
from servers.server_sessions import server_session

from utils.commands.experiments.races import pooled_totals
from utils.comparison.runs import Run
from utils.decode.steps import FinishReason
from utils.metrics.benchmark_figures import benchmark_figures
from utils.metrics.totals import Totals
from utils.repl.runner import Verdict
from utils.servers.address import ServerAddress
from utils.servers.kinds.completion import ServerAcceptance, ServerCompletion


def run_of(tokens: int | None, seconds: float, acceptance: ServerAcceptance | None = None) -> Run:
    answer = ServerCompletion(
        "x", (), FinishReason.LENGTH, "length", seconds, usage_tokens=tokens, acceptance=acceptance
    )
    return Run.of_server(ServerAddress("spec", "http://127.0.0.1:1"), answer)


def turns(*runs: Run) -> Totals:
    return pooled_totals(runs)


def counts(*accepted: int, rounds: int, forwards: int, valid: bool = True) -> ServerAcceptance:
    positions = tuple((count, rounds) for count in accepted)
    return ServerAcceptance(3 * rounds, sum(accepted), rounds, positions, valid=valid, forwards=forwards)


def test_figures_by_hand() -> None:
    conversation = turns(
        run_of(8, 2.0, counts(3, 1, rounds=4, forwards=5)), run_of(4, 1.0, counts(1, rounds=2, forwards=3))
    )
    single, faster = (turns(run_of(6, seconds, counts(2, 1, rounds=4, forwards=4))) for seconds in (3.0, 1.0))
    slow = turns(run_of(6, 6.0))
    figures = benchmark_figures(
        [[(conversation, turns(run_of(8, 4.0), run_of(4, 2.0))), (single, slow)], [(faster, slow)]]
    )
    # 12/3 and 6/3 over 12/6 and 6/6 tokens/s in the first repeat, 6/1 over 6/6 in the second.
    assert figures["speedup"] == pytest.approx(((4 + 2) / (2 + 1) + 6.0) / 2)
    assert figures["mean_accepted_tokens"] == 24 / 16
    assert figures["acceptance_length"] == pytest.approx((12 / 8 + 6 / 4 + 6 / 4) / 3)
    assert figures["conditional_acceptance"] == pytest.approx([8 / 14, 3 / 8])


def test_what_a_server_does_not_say_is_not_made_up() -> None:
    known = run_of(8, 2.0, counts(3, 1, rounds=4, forwards=5))
    for other in (None, counts(1, rounds=2, forwards=2, valid=False), ServerAcceptance(9, 3)):
        figures = benchmark_figures([[(turns(known), None), (turns(run_of(4, 1.0, other)), None)]])
        assert figures == dict.fromkeys(figures) | {"conditional_acceptance": []}, other
    assert benchmark_figures([[(turns(known), turns(run_of(None, 1.0)))]])["speedup"] is None


def test_a_file_of_spec_bench_has_its_table(view: Screen, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question_id": 1, "category": "stem", "turns": ["One", "Two"]},
        {"question_id": 2, "category": "qa", "turns": ["Three"]},
    ]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Loopback(faults=Faults(chunk_delay=0.03)) as plain, Loopback(faults=Faults(chunk_delay=0.01)) as spec:
        addresses = ServerAddress("plain", plain.url), ServerAddress("spec", spec.url, baseline="plain")
        session = server_session(view, *addresses, records=tmp_path / "r.jsonl")
        assert session.handle(f"/race 2 {tmp_path / 'q.jsonl'}") is Verdict.DONE, view.take()
    (record,) = records_of(tmp_path / "r.jsonl")
    found = {(row["task"], row["strategy"]): row["benchmark"] for row in record["findings"]}
    figures = found["all", "server spec"]
    assert figures["name"] == "Spec-Bench" and figures["speedup"] > 1.5 and figures["mean_accepted_tokens"] is None
    assert found["mt_bench", "server plain"]["speedup"] is None
    shown = view.take()[0]
    assert re.search(rf"overall +server spec +2 +{figures['speedup']:.2f}x +- +-", shown), shown

"""/whatif on=: the time of rounds on other hardware by hand, through measured points, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, checked, open_session, records_of, table_pair
from recordings import edited, recorded

from utils.commands import whatif
from utils.commands.experiments import other_hardware
from utils.commands.experiments.other_hardware import (
    ALONE,
    DEVICES,
    ERRORS,
    FITTED,
    MOST_ERROR,
    Deployment,
    Error,
    Shape,
    calibrated,
    measured,
    parse,
    woken,
)
from utils.errors import UserError
from utils.repl.repl_session import Verdict

MIXTRAL = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
LLAMA = {name: value for name, value in MIXTRAL.items() if "experts" not in name} | {"vocab_size": 128256}


def test_woken_experts_by_hand() -> None:
    assert woken(4, 1, 1) == 1 and woken(8, 2, 1) == 2
    assert woken(4, 1, 2) == 1.75  # 1 and then 3/4 of another one
    assert woken(128, 8, 32) == pytest.approx(111.77, abs=0.01)
    assert woken(8, 8, 3) == 8


def test_shapes_from_configs_have_the_published_sizes() -> None:
    dense, experts = Shape.of_config(LLAMA), Shape.of_config(MIXTRAL)
    assert dense.stored == pytest.approx(8.03e9, rel=1e-3)  # Llama-3.1-8B
    assert dense.stored - dense.always == 128256 * 4096, "the input embedding is not read"
    assert Shape.of_config(LLAMA | {"tie_word_embeddings": True}).stored == dense.always
    assert experts.stored == pytest.approx(46.7e9, rel=2e-3)  # Mixtral 8x7B, of which 12.9 billion are active
    assert experts.read(1) == pytest.approx(12.75e9, rel=2e-3)
    assert Shape.of_config({"text_config": LLAMA}) == dense
    # DeepSeek and Ling: the first layers have no experts, and one expert is always read.
    odd = Shape.of_config(MIXTRAL | {"first_k_dense_replace": 2, "num_shared_experts": 1, "moe_intermediate_size": 100})
    assert odd.expert == 30 * 3 * 4096 * 100
    attention = 32 * 4096 * 128 * 2 * (32 + 8)
    assert odd.always == 32000 * 4096 + attention + 2 * 3 * 4096 * 14336 + odd.expert


def test_bytes_of_keys_and_values_by_hand() -> None:
    shape = Shape.of_config(LLAMA)
    assert shape.cached == 32 * 8 * 128 * 2
    load = Deployment(shape, "H100", batch=3, context=1000)
    assert load.cache == 3 * 1000 * 131072  # two bytes for each value
    assert load.bytes_read() == load.cache + 2 * shape.always
    assert Deployment(shape, "H100", weights="fp8", context=0, batch=3).bytes_read() == shape.always


def test_a_step_is_a_fixed_time_and_reading() -> None:
    load = Deployment(Shape(1e9, 1e9), "H100", context=0)
    assert load.step == pytest.approx(FITTED.fixed + 2e9 / (FITTED.share * 3.35e12))
    assert Deployment(Shape(1e9, 1e9), "H100", batch=4, plain=200.0).step == 4 / 200


def test_a_round_by_hand() -> None:
    shape = Shape(1e9, 5e9, experts=4, active=1, expert=1e9)
    load = Deployment(shape, "H100", batch=2, context=0, plain=20.0)
    rows = 2 * (1 + 3 * FITTED.alike)
    reading = 0.1 - FITTED.fixed
    once, passes = 1e9 + 1e9 * woken(4, 1, 2), 1e9 + 1e9 * woken(4, 1, rows)
    seconds = FITTED.fixed + reading * (passes + 3 * shape.head) / once + FITTED.per_round + 3 * FITTED.per_draft
    assert load.prior(3) == pytest.approx(seconds / 0.1)
    # A tiny target that is faster than the fixed time of a pass.
    tiny = Deployment(shape, "H100", plain=10_000.0)
    assert tiny.prior(1) == pytest.approx((1e-4 + FITTED.per_round + FITTED.per_draft) / 1e-4)


@pytest.mark.parametrize("points", [{3: 1.4}, {3: 1.4, 7: 2.2}, {2: 1.9, 1: 1.5}])
def test_measured_points_are_reproduced_exactly(points: dict[int, float]) -> None:
    load = Deployment(Shape(8e9, 8e9), "H100", plain=100.0)
    ratio = calibrated(load.prior, points)
    assert {k: ratio(k) for k in points} == pytest.approx(points, rel=1e-12)
    measured = {k: (2.5 * 100 / r, None) for k, r in points.items()}
    again = Deployment(load.shape, "H100", plain=100.0, points=measured).ratio(dict.fromkeys(range(1, 8), 2.5))
    assert {k: 100 * 2.5 / again(k) for k in points} == pytest.approx({k: speed for k, (speed, _) in measured.items()})


def test_one_point_scales_the_extra_time_and_two_give_a_line() -> None:
    def prior(k: int) -> float:
        return 1 + 0.1 * k * k

    assert calibrated(prior, {})(5) == prior(5)
    assert calibrated(prior, {2: 1.8})(4) == pytest.approx(1 + 2 * 1.6)
    assert calibrated(prior, {2: 1.5, 4: 2.5})(3) == pytest.approx(2.0)
    assert calibrated(prior, {4: 1.5, 6: 2.5})(1) == 1.0, "a round is not shorter than a decode step"


def test_the_tokens_per_round_of_another_text_are_used() -> None:
    load = Deployment(Shape(8e9, 8e9), "H100", plain=100.0, points={3: (150.0, 3.0), 7: (150.0, None)})
    ratio = load.ratio(dict.fromkeys(range(1, 8), 2.4))
    assert ratio(3) == pytest.approx(2.0) and ratio(7) == pytest.approx(1.6)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", ("on=", "H100")),
        ("on=H2000", ("H2000", "Did you mean H200?")),
        ("on=rtx4080", ("RTX4080", "RTX4090")),
        ("on=H100 batch=64", ("64", "1 to 10", "nearest is 10")),
        ("on=H100 weights=fp7", ("fp7", "fp8")),
        ("on=H100 wieghts=fp8", ("wieghts", "weights")),
        ("on=H100 fast", ("'fast'", "NAME=VALUE")),
        ("on=H100 context=many", ("many", "whole number")),
        ("on=H100 plain=0", ("tokens/s", "above 0")),
        ("on=H100 plain=nan", ("nan",)),
        ("on=H100 k3=61tok/s", ("plain=",)),
        ("on=H100 plain=38 k9=61", ("k9", "k7")),
        ("on=H100 plain=38 k3=61@5", ("5", "1 to 4")),
    ],
)
def test_bad_input_gets_one_sentence_with_what_is_allowed(line: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        parse(line)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_good_input() -> None:
    values = parse("on=h100-pcie target=7B batch=8 context=8k weights=FP8 plain=38tok/s k3=61tok/s@2.5 k7=70")
    points = {3: (61.0, 2.5), 7: (70.0, None)}
    assert values.pop("points") == points
    assert values == {
        "device": "H100-PCIe", "target": "7B", "batch": 8, "context": 8192, "weights": "fp8", "plain": 38.0
    }  # fmt: skip
    assert {parse(f"on={word}")["device"] for word in ("rtx-4090", "RTX_4090", "rtx4090")} == {"RTX4090"}


def test_a_target_is_a_size_a_config_or_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MIXTRAL), encoding="utf-8")
    assert Shape.named(str(file)) == Shape.named(str(tmp_path)) == Shape.of_config(MIXTRAL)
    assert Shape.named("7B") == Shape(7e9, 7e9)
    for content in (
        "{",
        "[]",
        "[" * 100_000,
        json.dumps({"hidden_size": "x"}),
        json.dumps(LLAMA | {"kv_lora_rank": 1}),
    ):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match="target=7B"):
            Shape.named(str(file))
    for word in ("0B", "7", "nobody/nothing", str(tmp_path / "no.json"), "70X"):
        with pytest.raises(UserError, match="7B"):
            Shape.named(word)


def test_what_does_not_fit_gets_no_number() -> None:
    with pytest.raises(UserError, match=r"do not fit.*weights=fp8 or weights=int8"):
        Deployment(Shape(70e9, 70e9), "H100").check()
    with pytest.raises(UserError, match="on=B200"):
        Deployment(Shape(70e9, 70e9), "RTX4090").check()
    with pytest.raises(UserError, match="no device"):
        Deployment(Shape(1e12, 1e12), "H200").check()
    Deployment(Shape(70e9, 70e9), "H100", weights="fp8").check()


def test_what_published_figures_do_not_cover_gets_no_number() -> None:
    shape = Shape.of_config(LLAMA)
    with pytest.raises(UserError, match=r"keys and values are 36%.*plain="):
        Deployment(shape, "H100", batch=8, context=8192).check()
    Deployment(shape, "H100", batch=8, context=8192, plain=300.0).check()
    Deployment(shape, "H100", context=8192).check()
    with pytest.raises(UserError, match="config"):
        Deployment(Shape(7e9, 7e9), "H100", context=8192).check()
    with pytest.raises(UserError, match="no published figures"):
        Deployment(Shape.of_config(MIXTRAL), "H200").check()


@pytest.mark.parametrize("median", [MOST_ERROR + 0.001, MOST_ERROR])
def test_a_class_with_large_errors_gets_the_reason_and_no_number(
    median: float, view: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whatif, "StepwiseDrafter", object)
    monkeypatch.setitem(ERRORS, ("dense", 0), Error(median, 0.9, 10, 2))
    session = open_session(view)
    session.handle("Hello there")
    view.take()
    if median > MOST_ERROR:
        assert session.handle("/whatif on=H100 target=8B") is Verdict.FAILED
        shown, message = view.take()
        assert "25%" in message and "0 measured speeds" in message and "x" not in shown
    else:
        assert session.handle("/whatif on=H100 target=8B") is Verdict.DONE
        assert "90%" in view.take()[0]


def predicted(view: Screen, tmp_path: Path, line: str) -> tuple[dict[str, Any], str]:
    session = open_session(view, records=tmp_path / "records.jsonl")
    report = checked(session, tmp_path / "records.jsonl", "/length 12", "Hello there", "/whatif", line)
    return report, view.take()[0]


def test_acceptance_comes_from_the_replay_and_its_interval_from_the_errors(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whatif, "StepwiseDrafter", object)
    report, shown = predicted(view, tmp_path, "/whatif on=H100 target=8B plain=100")
    assert report["record"] == "whatif on" and [row["gamma"] for row in report["findings"]] == [*range(1, 8)]
    load, error = Deployment(Shape(8e9, 8e9), "H100", plain=100.0), ERRORS["dense", 1]
    for row in report["findings"]:
        speedup = row["tokens_per_round"] / load.prior(row["gamma"])
        assert row["predicted_speedup"] == pytest.approx(speedup) and row["tokens_per_second"] == pytest.approx(
            100 * speedup
        )
        assert row["interval"] == pytest.approx([speedup / (1 + error.high), speedup * (1 + error.high)])
    assert all(f"{part:.0%}" in shown for part in (error.median, error.high)), "the error of its class is printed"


def test_predicted_and_measured_figures_never_share_a_line(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whatif, "StepwiseDrafter", object)
    for line in ("/whatif on=H100 target=8B", "/whatif on=H100 target=8B plain=123.25 k7=77.75"):
        report, shown = predicted(view, tmp_path, line)
        last = shown[shown.index("/whatif on=") :].splitlines()
        measured = [text for text in last if "123.25" in text or "77.75" in text]
        assert len(measured) == ("plain" in line) and not any("predicted" in text for text in measured)
        assert not any("predicted" in text for text in last if "Replayed" in text)
        speeds = {row["tokens_per_second"] for row in report["findings"]}
        assert (None in speeds) == ("plain" not in line)


def test_the_replay_of_a_chain_uses_the_loaded_drafter_alone(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whatif, "StepwiseDrafter", object)
    session = open_session(view, records=tmp_path / "records.jsonl")
    lines = ("/length 12", "/drafter_kind loaded", "Hello there", "/whatif", "/drafter_kind chain")
    rounds = checked(session, tmp_path / "records.jsonl", *lines[:4])["findings"]
    found = checked(session, tmp_path / "records.jsonl", lines[4], "/whatif on=H100 target=8B")["findings"]
    by_gamma = {row["gamma"]: row["tokens_per_target_forward"] for row in rounds if row["drafter"] == "model"}
    assert [row["tokens_per_round"] for row in found] == [by_gamma[gamma] for gamma in range(1, 8)]


def test_drafters_without_published_figures_need_two_points(view: Screen, tmp_path: Path) -> None:
    session = open_session(view)
    session.handle("Hello there")
    for line in ("/whatif on=H100 target=8B", "/whatif on=H100 target=8B plain=9 k3=9"):
        assert session.handle(line) is Verdict.FAILED and "heads" in view.take()[1]
    assert session.handle("/whatif on=H100 target=8B plain=90 k3=60 k7=50") is Verdict.DONE
    session = open_session(view, table_pair(drafter=False))
    session.handle("Hello there")
    assert session.handle("/whatif on=H100 target=8B") is Verdict.FAILED and "/load" in view.take()[1]


def test_an_impossible_measured_speed_is_refused(view: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whatif, "StepwiseDrafter", object)
    session = open_session(view)
    for line in ("/length 12", "Hello there", "/whatif on=H100 target=8B plain=10 k2=31"):
        verdict = session.handle(line)
    message = view.take()[1]
    assert verdict is Verdict.FAILED and "k2=31" in message and "tokens per round" in message


def test_points_from_a_file_are_the_means_of_its_runs(
    view: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whatif, "StepwiseDrafter", object)
    kinds = ("/drafter_kind chain", "/gamma 2", "Hello there"), ("/drafter_kind loaded", "/gamma 2", "Hello there")
    lines = ("/length 12", *kinds[0], *kinds[1], "One two three", "/gamma 5", "Hello there")
    speeds = {"target": iter((90, 80, 125, 100)), "speculative": iter((999, 40, 60, 30)), "ngram": iter((999,) * 4)}
    file = edited(
        recorded(view, tmp_path, *lines),
        lambda row: row.update(decode_tokens_per_second=next(speeds[row["strategy"]])),
    )
    rows = [row for row in records_of(file) if row["strategy"] == "speculative"][1:]
    found = measured(records_of(file))
    assert found["plain"] == pytest.approx((90 * 80 * 125 * 100) ** 0.25)
    drafts = [sum(row["drafted"] for row in part) / sum(row["rounds"] for row in part) for part in (rows[:2], rows[2:])]
    lengths = [24 / sum(row["target_forwards"] for row in rows[:2]), 12 / rows[2]["target_forwards"]]
    assert [*found["points"]] == pytest.approx(drafts) and 1.5 < drafts[0] <= 2 < drafts[1] <= 5
    points = zip(((40 * 60) ** 0.5, 30), lengths, strict=True)
    assert [number for point in found["points"].values() for number in point] == pytest.approx(
        [number for point in points for number in point]
    )
    report, shown = predicted(view, tmp_path, f"/whatif on=H100 target=8B from={file}")
    load = Deployment(Shape(8e9, 8e9), "H100", **found)
    ratio = load.ratio({})
    for row in report["findings"]:
        assert row["predicted_speedup"] == pytest.approx(row["tokens_per_round"] / ratio(row["gamma"]))
    assert f"{ERRORS['dense', 3].median:.0%}" in shown and f"plain {found['plain']:.4g}" in shown


def test_a_file_without_points_is_refused(view: Screen, tmp_path: Path) -> None:
    file = recorded(view, tmp_path, "/length 12", "/drafter_kind loaded chain", "Hello there")
    session = open_session(view)
    session.handle("Hello there")
    assert session.handle(f"/whatif on=H100 target=8B from={file}") is Verdict.FAILED
    assert "/drafter_kind loaded" in view.take()[1]
    for others in ("plain=9", "batch=2"):
        assert session.handle(f"/whatif on=H100 target=8B from={file} {others}") is Verdict.FAILED
        assert "one request at a time" in view.take()[1]


def test_every_device_has_a_source() -> None:
    assert len(DEVICES) >= 12
    for device in DEVICES.values():
        assert "." in device.source and 1e11 < device.bandwidth < 1e13 and 1e10 < device.memory < 1e12
    assert other_hardware.ERRORS["experts", ALONE].median > MOST_ERROR, "the speed of experts alone is not predicted"

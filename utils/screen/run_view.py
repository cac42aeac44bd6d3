"""Shows one run as it progresses, the comparison of finished runs, and the findings of a report.

A character may need several tokens, and a line several words. So tokens become text first, which is wrapped between
words as it grows; its parts keep their styles, such as that of an accepted draft.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from utils.comparison.arms import Arm, ComparedRun, Run, divergence_sentence, relation, start_of_context
from utils.comparison.harness import LastPrompt, own_conversations
from utils.comparison.records import Report, Row
from utils.comparison.speed_claims import STAR, ending, is_noise, server_summary, summary
from utils.config.settings import Settings
from utils.decode.steps import Step
from utils.metrics.divergence import Divergence
from utils.metrics.results import DraftTrace, RoundTiming, first_difference
from utils.screen.renderer import ACCEPTED, NAME, NOISE, NOTE, ColouredPiece, Renderer, Text, cell_len
from utils.servers.kinds.completion import Piece
from utils.text import TextStream, count_of, token_piece, visible

OWN_CONVERSATION = "{}: its earlier answers differ since turn {}, so its text is not comparable"

RATIO_LEVELS = ((0.995, "●", "green"), (0.5, "◕", "cyan"), (0.1, "◑", "yellow"), (0.0, "○", "red"))  # from this p/q on
LEGEND = (
    "+ accepted, - rejected, = corrected, * bonus · ● p/q at least 1, ◕ at least 0.5, ◑ at least 0.1, ○ less; "
    "probabilities before temperature and top-k/p; drafts without a distribution count as q = 1"
)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _speedup(entry: ComparedRun) -> str:
    return NOISE if is_noise(entry) else _number(entry.comparison.speedup, "{:.2f}x" + _star(entry))


def _star(entry: ComparedRun) -> str:
    return STAR if entry.run.other_tokens else ""


# The columns of the comparison: their headings, and the cell of a run.
COLUMNS: dict[str, Callable[[ComparedRun], str]] = {
    "strategy": lambda entry: entry.run.name,
    "tokens": lambda entry: _number(entry.run.new_tokens, "{}"),
    "seconds": lambda entry: f"{entry.run.seconds:.2f}",
    "first token, s": lambda entry: _number(entry.run.first_seconds, "{:.2f}"),
    "tokens/s": lambda entry: _number(entry.run.tokens_per_second, "{:.1f}" + _star(entry)),
    "decode tokens/s": lambda entry: _number(entry.run.decode_tokens_per_second, "{:.1f}"),
    "speed-up": _speedup,
    "acceptance": lambda entry: _number(entry.run.acceptance_rate, "{:.3f}"),
    "drafts/round": lambda entry: _number(entry.run.drafts_per_round, "{:.1f}"),
    "tokens/forward": lambda entry: _number(entry.run.tokens_per_target_forward, "{:.2f}"),
    "text": lambda entry: entry.comparison.text,
}
OF_SERVERS = ("first token, s", "decode tokens/s")  # shown only beside servers
# Columns that are dropped on a narrow screen, in this order.
OPTIONAL = ("seconds", "drafts/round", "tokens", "first token, s", "acceptance", "decode tokens/s")


@dataclass(slots=True)
class PromptView:
    """Shows the runs of one prompt: the first text in full, and the differences of the others.

    Texts of servers are shown apart from those of strategies. `shown` are the runs whose texts are on the screen.
    """

    renderer: Renderer
    tokenizer: Any
    settings: Settings
    shown: list[Run] = field(default_factory=list)
    has_legend: bool = False


class RunView:
    """Shows one run: its text as it grows, or its progress and then its text. With /debug, every round comes first."""

    def __init__(self, prompt: PromptView, arm: Arm) -> None:
        self._prompt, self.arm, self._renderer = prompt, arm, prompt.renderer
        is_local = arm.strategy is not None
        self._earlier = [run for run in prompt.shown if run.is_local == is_local]
        level = prompt.settings.debug if arm.strategy and arm.strategy.drafts else "off"
        self._shows_rounds, self._rounds = level != "off", 0  # how many are on the screen
        # With /debug full the drafts of each strategy are worth a look, even if the texts are equal.
        self._in_full = level == "full" or not self._earlier
        self._stream = MarkedStream(prompt.tokenizer) if is_local else None
        self._lines = WrappedText(prompt.renderer.stream_width)
        self._text = Text()
        self._tokens = self._characters = 0
        if self.is_long:
            self._renderer.title(arm.title, arm.colour)
        if level == "full" and not prompt.has_legend:
            prompt.has_legend = True
            self._renderer.remark(LEGEND)
        self._count("reading the prompt ..." if is_local else "waiting for the first token ...")

    @property
    def is_long(self) -> bool:
        """Whether its whole text or its rounds are shown."""
        return self._in_full or self._shows_rounds

    def failed(self) -> None:
        """End the lines of a run without a result, whose title must be on the screen above its error."""
        self._renderer.end_progress()
        if not self.is_long:
            self._renderer.title(self.arm.title, self.arm.colour)
        elif self._text and not self._shows_rounds:
            self._write(Text(), kept=self._stream is not None)

    def reading(self, done: int, total: int) -> None:
        self._renderer.step(f"{self.arm.name}: reading the prompt, {done:,} of {total:,} tokens")

    def step(self, step: Step, timing: RoundTiming, traces: Sequence[DraftTrace] = ()) -> None:
        assert self._stream is not None
        self._tokens += len(step.tokens)
        text = self._stream.add(step)
        self._text.append_text(text)
        if self._shows_rounds:
            self._rounds += 1
            tokenizer = self._prompt.tokenizer
            show_round(self._renderer, self._rounds, step, tokenizer, timing=timing, traces=traces)
        elif self._in_full:
            self._renderer.stream(self._lines.add(text))
        else:
            self._count(f"{self._tokens}/{self._prompt.settings.length} tokens ...")

    def piece(self, piece: Piece) -> None:
        self._characters += len(piece.text)
        text = Text(visible(piece.text))
        self._text.append_text(text)
        if self._in_full:
            self._renderer.stream(self._lines.add(text), kept=False)  # it may contain the server's key
        else:
            self._count(f"{count_of(self._characters, 'character')} ...")

    def _count(self, progress: str) -> None:
        self._renderer.count(f"{self.arm.name}: {progress}")

    def end(self, run: Run) -> None:
        """Show the rest of the text, or the difference, and the figures of the finished run."""
        self._renderer.end_progress()
        rest = Text() if self._stream is None else self._stream.end()
        self._text.append_text(rest)
        if self._in_full:
            self._end_in_full(run, self._text if self._shows_rounds else rest)
        else:
            self._show_difference(run)
        if self.is_long:
            self._renderer.remark(figures_line(run, self._prompt.settings.length))
        self._prompt.shown.append(run)

    def _end_in_full(self, run: Run, rest: Text) -> None:
        if not run.is_local:
            self._renderer.keep(run.text)
        self._write(rest, kept=run.is_local)
        if not self._text.plain.strip():
            tokens = "" if run.new_tokens is None else f", {count_of(run.new_tokens, 'token')}"
            self._renderer.remark(f"(no visible text{tokens})")
        self._explain_marks(self._text)

    def _show_difference(self, run: Run) -> None:
        """Show one line if the text is already on the screen, otherwise the text from the first difference on."""
        if not run.is_local:  # what has arrived may contain the server's key
            self._text = Text(visible(run.text))
        other, sentence = relation(run, self._earlier)
        ended, other_ended = (ending(one, self._prompt.settings.length) for one in (run, other))
        ours, theirs = self._text.plain, visible(other.text)
        if not sentence.endswith(":"):
            self._write(self._named(sentence + (f" ({ended})" if ended and ended != other_ended else "")))
        elif ours == theirs:
            self._write(self._named(sentence.removesuffix(":") + ", but the text reads the same"))
        else:
            first = start_of_context(ours, first_difference(ours, theirs) or 0)
            shown = self._text[first:]
            self._write(self._named(f"{sentence} {'... ' if first else ''}") + shown)
            if ended and ended != other_ended:
                self._renderer.remark(ended)
            self._explain_marks(shown)

    def _named(self, sentence: str) -> Text:
        """A sentence about the run, after its title if that is not on the screen yet."""
        return Text.assemble(("" if self.is_long else f"{self.arm.title} ", NAME), (sentence, NOTE))

    def _write(self, text: Text, *, kept: bool = True) -> None:
        self._renderer.stream(self._lines.add(text) + self._lines.end(), kept=kept)
        self._renderer.newline()

    def _explain_marks(self, text: Text) -> None:
        if any(span.style == ACCEPTED for span in text.spans):
            self._renderer.explain_marks()


def figures_line(run: Run, length: int) -> str:
    tokens = "an unknown number of tokens" if run.new_tokens is None else count_of(run.new_tokens, "token")
    parts = [f"{tokens} in {run.seconds:.2f} s"]
    if not run.is_local and run.first_seconds is not None:
        parts.append(f"first after {run.first_seconds:.2f} s")
    if run.drafted:
        parts.append(f"{run.accepted} of {count_of(run.drafted, 'draft')} accepted")
    if run.forced:
        parts.append(f"{count_of(run.forced, 'token')} forced by the format")
    return " · ".join(filter(None, [*parts, ending(run, length)]))


def round_pieces(step: Step, tokenizer: Any, traces: Sequence[DraftTrace] = ()) -> list[ColouredPiece]:
    """The tokens of a round: accepted drafts in green, rejected ones in red, the corrected or bonus token in blue.

    Signs carry the same information without colour. Drafts with a trace get the colour and the shape of their p/q.
    """
    pieces = [("+", "green", token) for token in step.drafted[: step.accepted]]
    pieces += [("-", "red", token) for token in step.drafted[step.accepted :]]
    painted = [(sign + token_piece(tokenizer, token), colour) for sign, colour, token in pieces]
    for position, trace in enumerate(traces):
        _, shape, colour = next(level for level in RATIO_LEVELS if trace.ratio >= level[0])
        painted[position] = (painted[position][0] + shape, colour)
    if step.token is not None:
        painted.append((("*" if step.is_bonus else "=") + token_piece(tokenizer, step.token), "blue"))
    return painted


def trace_lines(traces: Sequence[DraftTrace], tokenizer: Any) -> list[str]:
    """Lines on the drafts of a round: why one was rejected, and by how many tokens of context n-grams were found."""
    lines = [_rejection(trace, tokenizer) for trace in traces if not trace.is_accepted]
    matches = [trace for trace in traces if trace.match_length is not None]
    hits = [f"{token_piece(tokenizer, trace.token)} ({trace.match_length or 'seed'})" for trace in matches]
    return [*lines, f"hits: {'; '.join(hits)}"] if hits else lines


def _rejection(trace: DraftTrace, tokenizer: Any) -> str:
    draft, target = token_piece(tokenizer, trace.token), token_piece(tokenizer, trace.target_token)
    # A sampled token may be less likely than the draft.
    verb = "preferred" if trace.target_p > trace.p else "drew"
    figures = [f"p {trace.p:.2g}"]
    if trace.q is not None:
        figures += [f"drafter q {trace.q:.2g}", f"p/q {trace.ratio:.2g}"]
    if trace.acceptance is not None and 0 < trace.acceptance < 1:
        figures.append(f"acceptance probability {trace.acceptance:.2g}")
    return (
        f"{draft} rejected: the target {verb} {target} (p {trace.target_p:.2g}); "
        f"{draft} was rank {trace.rank} ({', '.join(figures)})"
    )


def show_round(
    renderer: Renderer,
    number: int,
    step: Step,
    tokenizer: Any,
    *,
    timing: RoundTiming,
    traces: Sequence[DraftTrace] = (),
) -> None:
    """Show a line with drafts, the target's token and the timing. With traces, further lines explain the drafts."""
    pieces = round_pieces(step, tokenizer, traces)
    parts = {"draft": timing.drafting, "verify": timing.verifying, "other": timing.other}
    shown = " | ".join(f"{name} {1000 * seconds:.1f}" for name, seconds in parts.items())
    renderer.pieces(f"{number:4d} ", [*pieces, (f"{shown} ms | +{len(step.tokens)}", NOTE)])
    for line in trace_lines(traces, tokenizer):
        renderer.pieces("     ", [(word, NOTE) for word in line.split(" ")])


def show_table(renderer: Renderer, compared: Sequence[ComparedRun]) -> None:
    beside_servers = not all(entry.run.is_local for entry in compared)
    columns = {heading: cell for heading, cell in COLUMNS.items() if beside_servers or heading not in OF_SERVERS}
    rows = [tuple(cell(entry) for cell in columns.values()) for entry in compared]
    colours = [entry.arm.colour for entry in compared]
    renderer.newline()
    renderer.table([*columns], rows, OPTIONAL, colours=colours)


def show_comparison(renderer: Renderer, last: LastPrompt, causes: Iterable[tuple[str, Divergence]]) -> None:
    """Show the table of runs, a line for each text that differs or cannot be compared, and an explanation.

    `causes` has the names of strategies, and why their texts differ from the target's.
    """
    if last.compared:
        show_table(renderer, last.compared)
    if last.is_local:
        pair = last.job.pair
        for strategy, turn in own_conversations(last):
            renderer.result(OWN_CONVERSATION.format(strategy.name, turn))
        for name, divergence in causes:
            renderer.result(f"{name} {divergence_sentence(divergence, pair.tokenizer)}")
        other = pair.engine.faster_baseline()
        own = [one for one in last.compared if one.run.is_local]
        if sentence := summary(own, last.jobs, other.sentence if other else ""):
            renderer.result(sentence)
    for sentence in server_summary(last):
        renderer.result(sentence)


def show_report(renderer: Renderer, report: Report, rows: Sequence[Row], conclusion: Sequence[str]) -> None:
    cells = [report.cells(row) for row in report.shown(rows)]
    renderer.result(report.headline)
    if report.transposed:  # one line for each heading, and one column for each row
        headings, *lines = zip(report.headings, *cells, strict=True)
        renderer.table(headings, lines)
    else:
        renderer.table(report.headings, cells, report.optional)
    for line in conclusion:
        renderer.result(line)
    if attachment := report.attachment(rows):
        renderer.data(attachment)


class MarkedStream:
    """The text that the steps of a run complete, safe to show, with the style of accepted drafts."""

    def __init__(self, tokenizer: Any) -> None:
        self._text = TextStream(tokenizer)
        self._style = ACCEPTED  # unless a token of the held-back text was not accepted

    def add(self, step: Step) -> Text:
        """The text that a step completes. A character of several tokens counts as a draft only if all of them are
        drafts.
        """
        completed = Text()
        for index, token in enumerate(step.tokens):
            self._style = self._style if index < step.accepted else ""
            if text := self._text.add((token,)):
                completed.append_text(self._styled(text))
        return completed

    def end(self) -> Text:
        """The rest of the text, incomplete characters included."""
        return self._styled(self._text.end())

    def _styled(self, text: str) -> Text:
        style, self._style = self._style, ACCEPTED
        return Text.assemble((visible(text), style))


class WrappedText:
    """Growing text, wrapped at word boundaries: a word is held back until it is known to fit into the line.

    `width` is the number of columns, and None does not wrap. Wide characters are usually written without spaces, so a
    line may end at any of them.
    """

    def __init__(self, width: int | None) -> None:
        self._width = width
        self._column = 0
        self._gap, self._word = Text(), Text()

    def add(self, text: Text) -> Text:
        """The text that can be shown now."""
        if self._width is None or not text:
            return text
        shown = Text()
        for character in text.divide(range(1, len(text))):
            shown.append_text(self._add(character, self._width))
        return shown

    def _add(self, character: Text, width: int) -> Text:
        if character.plain == "\n":
            shown, self._column = self.end() + character, 0
            return shown
        if character.plain in " \t":
            shown = self.end() if self._word else Text()
            self._gap.append_text(character)
            return shown
        # A wide character ends the word before it and is a word of its own.
        wide = character.cell_len > 1
        shown = self.end() if wide and self._word else Text()
        self._word.append_text(character)
        # A word as wide as the line is shown at once, because no other line could hold it.
        return shown + self.end() if wide or self._word.cell_len >= width else shown

    def end(self) -> Text:
        """The text that was held back."""
        gap, word, self._gap, self._word = self._gap, self._word, Text(), Text()
        size = cell_len(gap.plain.expandtabs()) + word.cell_len
        # The gap is dropped where the line breaks.
        if word and self._column and self._width is not None and self._column + size > self._width:
            self._column = word.cell_len
            return Text("\n") + word
        self._column += size
        return gap + word

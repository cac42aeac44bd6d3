"""Shows the answers of servers: the first text in full, and the differences of the others."""

from collections.abc import Sequence

from utils.comparison.server_runs import COLOURS, PREFIX, ServerPrompt, ServerRun, row_name
from utils.comparison.text_relation import start_of_context, start_of_difference
from utils.metrics.results import first_difference
from utils.screen.marked_text import Mark, MarkedPiece, WrappedText
from utils.screen.renderer import Renderer
from utils.servers.kinds.completion import Piece
from utils.text import count_of, visible

TITLE = "Server {}"
NONE = "(no text)"


class ServerView:
    """Shows one answer as it grows, or its progress and then its relation to the texts above it.

    `earlier` has the finished runs whose texts are on the screen.
    """

    def __init__(self, renderer: Renderer, name: str, colour: str, earlier: Sequence[ServerRun]) -> None:
        self._renderer, self._name, self._colour, self._earlier = renderer, name, colour, earlier
        self._lines = WrappedText(renderer.stream_width, renderer.cells)
        self._characters = 0

    @property
    def _in_full(self) -> bool:
        return not self._earlier

    @property
    def _title(self) -> str:
        return TITLE.format(self._name.removeprefix(PREFIX))

    def begin(self) -> None:
        """Show what comes before the first piece."""
        if self._in_full:
            self._renderer.title(self._title, self._colour)
        self._renderer.count(f"{self._name}: waiting for the first token ...")

    def failed(self) -> None:
        """Show the title of a run without a result above its error, unless it is on the screen."""
        self._renderer.end_progress()
        if self._characters and self._in_full:
            self._write([])
        if not self._in_full:
            self._renderer.title(self._title, self._colour)

    def show(self, piece: Piece) -> None:
        """Show one more piece."""
        self._characters += len(piece.text)
        if self._in_full:
            self._renderer.stream(self._lines.add([(visible(piece.text), Mark.TEXT)]))
        else:
            self._renderer.count(f"{self._name}: {count_of(self._characters, 'character')} ...")

    def end(self, run: ServerRun) -> None:
        """Show the rest of the text, or the difference, and the figures of the finished run."""
        self._renderer.end_progress()
        if not self._in_full:
            self._show_difference(run)
            return
        self._write([])
        if not run.text.strip():
            self._renderer.remark(NONE)
        self._renderer.remark(figures(run))

    def _show_difference(self, run: ServerRun) -> None:
        """Show one line if the text is already on the screen, otherwise the text from the first difference on."""
        text = visible(run.text)
        other = next((one for one in self._earlier if one.text == run.text), None)
        title = (f"{self._title} ", Mark.NAME)
        if other is not None:
            as_other = "" if other is self._earlier[0] else f" as {other.name}"
            self._write([title, (f"= same text{as_other}", Mark.NOTE)])
            return
        other = self._baseline(run)
        theirs = visible(other.text)
        start = start_of_difference(text, theirs)
        first = start_of_context(text, start)
        place = first_difference(text, theirs)
        named = "" if other is self._earlier[0] else f" from {other.name}"
        sentence = f"differs{named} from character {(place or 0) + 1}: {'... ' if first else ''}"
        self._write([title, (sentence, Mark.NOTE), (text[first:], Mark.TEXT)])

    def _baseline(self, run: ServerRun) -> ServerRun:
        """The run on the screen to compare with: the baseline's, or else the first one."""
        name = None if run.address.baseline is None else row_name(run.address.baseline)
        return next((one for one in self._earlier if one.name == name), self._earlier[0])

    def _write(self, pieces: Sequence[MarkedPiece]) -> None:
        self._renderer.stream([*self._lines.add(pieces), *self._lines.end()])
        self._renderer.newline()


def show_server_runs(renderer: Renderer, prompt: ServerPrompt) -> None:
    """Show the answers to a prompt again in the same way."""
    earlier: list[ServerRun] = []
    for index, (run, _) in enumerate(prompt.compared):
        view = ServerView(renderer, run.name, COLOURS[index % len(COLOURS)], list(earlier))
        view.begin()
        view.show(Piece(run.text))
        view.end(run)
        earlier.append(run)


def figures(run: ServerRun) -> str:
    """The line of figures below a text."""
    tokens = "an unknown number of tokens" if run.new_tokens is None else count_of(run.new_tokens, "token")
    parts = [f"{tokens} in {run.seconds:.2f} s"]
    if run.first_seconds is not None:
        parts.append(f"first after {run.first_seconds:.2f} s")
    if run.drafted:
        parts.append(f"{run.accepted} of {count_of(run.drafted, 'draft')} accepted")
    if run.finish.value != "stop":
        parts.append("cut (/length)" if run.finish.value == "length" else run.finish.value)
    return " · ".join(parts)

"""How a local server is to be started: engine, target, drafter and draft length. Nothing is started here."""

from dataclasses import dataclass, replace

from utils.bounds import WholeRange
from utils.errors import UserError

NGRAM = "ngram"  # the drafter that reads its drafts from the text itself
EMBEDDED = "embedded"  # the model that is always there, as a target or a drafter
DEFAULT_DRAFT = 4  # drafts per round where a drafter is given without a length
DRAFTS = WholeRange(0, 256)
CONTEXT = WholeRange(16, 100_000_000)
PARALLEL = WholeRange(1, 4096)
ADDRESS_FLAGS = ("--host", "--port", "--uds", "--reuse-port")


@dataclass(frozen=True, slots=True)
class Launch:
    """One server to start. `checked` validates the values.

    engine: the name of a row of `programs.PROGRAMS`. model: the target, a file, folder, hub name or EMBEDDED. drafter:
    a model likewise, NGRAM, or "" for none. draft: maximum drafts per round, None for the default, 0 to decode without
    speculation. method: the engine's own word for how the drafter drafts, "" for that of an ordinary model. context:
    tokens, None for the engine's choice. parallel: requests that are computed at the same time, None likewise. program:
    the executable, "" to look for it. flags: further arguments, passed on as they are.
    """

    engine: str
    model: str
    drafter: str = ""
    draft: int | None = None
    method: str = ""
    context: int | None = None
    parallel: int | None = None
    program: str = ""
    flags: tuple[str, ...] = ()

    @property
    def drafts(self) -> int:
        """Maximum drafts per round; 0 means no speculation."""
        if not self.drafter:
            return 0
        return DEFAULT_DRAFT if self.draft is None else self.draft

    @property
    def speculates(self) -> bool:
        return self.drafts > 0

    @property
    def label(self) -> str:
        """What distinguishes it from other launches of the engine: how it drafts, "" without speculation."""
        if not self.speculates:
            return ""
        return f"{NGRAM if self.drafter == NGRAM else 'draft'}{self.drafts}"

    def checked(self) -> "Launch":
        """The launch itself. Raises UserError for a value that is not valid."""
        if not self.model:
            raise UserError("a server needs a target, for example target=Qwen/Qwen3-4B.")
        if self.draft is not None:
            DRAFTS.check(self.draft, "draft")
        if self.draft and not self.drafter:
            raise UserError(f"draft={self.draft} needs a drafter: drafter=MODEL or drafter={NGRAM}.")
        if self.method and not self.drafter:
            raise UserError(f"method={self.method} needs a drafter: drafter=MODEL.")
        if self.context is not None:
            CONTEXT.check(self.context, "context")
        if self.parallel is not None:
            PARALLEL.check(self.parallel, "parallel")
        if refused := next((flag for flag in self.flags if flag.partition("=")[0] in ADDRESS_FLAGS), None):
            raise UserError(
                f"{refused} cannot be given: a server is started on the loopback interface, on a free port."
            )
        return self

    def with_draft(self, draft: int) -> "Launch":
        """The same server with another draft length."""
        return replace(self, draft=draft).checked()

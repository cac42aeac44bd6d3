"""The part of a setting's command that /help shows."""

from dataclasses import dataclass

from utils.commands.registry import Page


@dataclass(frozen=True, slots=True)
class SettingHelp:
    """Group, place on the first page (rank), summary and page.

    usage: instead of that of the value type, if it is long.
    """

    group: str
    summary: str
    page: Page
    rank: int = 0
    usage: str = ""

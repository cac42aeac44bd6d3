"""The effects of a command that only show something."""

from utils.commands.shared.outcomes import ClearScreen, Effect, Reply, ShowRows, ShowTable, ShowTexts
from utils.screen.renderer import Renderer


def show_effect(effect: Effect, renderer: Renderer) -> bool:
    """Show the effect if it is of this kind. Returns whether it was shown."""
    match effect:
        case Reply(text):
            renderer.reply(text)
        case ShowRows(rows):
            renderer.rows(rows)
        case ShowTable(headings, rows):
            renderer.table(headings, rows)
        case ShowTexts(columns):
            renderer.columns(columns)
        case ClearScreen():
            renderer.clear()
        case _:
            return False
    return True

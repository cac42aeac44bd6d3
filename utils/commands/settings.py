"""One command for each setting, derived from the tables in `utils.config`.

`/gamma` shows the value, `/gamma 6` sets it, and `/cache` without an argument switches.
"""

from collections.abc import Iterator
from functools import partial

from utils.commands.registry import ALIASES, Command, Page
from utils.commands.setting_changes import set_or_show
from utils.commands.setting_help import SettingHelp
from utils.commands.setting_pages import SETTING_HELP
from utils.commands.setting_words import SETTING_WORDS
from utils.config.setting_parts import SAMPLING_PARTS
from utils.config.settings import setting_fields

OWN_COMMANDS = ("ngram", "turns")  # they have sub-commands


def setting_commands() -> Iterator[Command]:
    """A command for every setting, except for those with sub-commands."""
    settings = {name: entry for name, entry in setting_fields().items() if name not in (*OWN_COMMANDS, *ALIASES)}
    for name, entry in (settings | {part.name: part for part in SAMPLING_PARTS}).items():
        about = SETTING_HELP.get(name, SettingHelp("", entry.help, Page(entry.help, ())))
        yield Command(
            name,
            about.usage or entry.usage,
            about.summary,
            partial(set_or_show, name, entry),
            group=about.group,
            rank=about.rank,
            page=about.page,
            current=entry.show,
            words=entry.words,
            meanings=SETTING_WORDS.get(name, {}),
            free_text=name == "system",
        )

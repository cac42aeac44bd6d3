"""How a drafter's checkpoint is read if it does not say so itself: by what predicts the target's own text best.

It runs after the engine has started and before anything is measured. The result is remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from utils.comparison.harness import Harness
from utils.config.settings import Settings
from utils.decode.features import layer_count
from utils.errors import UserError
from utils.models.feature_drafter import Conventions, FeatureDrafter
from utils.pairs.doctor import OWN_PROMPT, Diagnosis, examine, own_text
from utils.pairs.stored_readings import StoredReadings, reading_key

LOAD_TOKENS = 128  # of the target's own text
FILE = "readings.json"  # in the cache folder
DOCTOR = "/pair doctor"
INTERRUPTED = f"The drafter is read as its files declare: its examination was interrupted ({DOCTOR} repeats it)."


@dataclass(frozen=True, slots=True)
class Remembered:
    """Where the reading of one drafter and target is kept from one start to the next."""

    file: StoredReadings
    key: str

    @classmethod
    def of(cls, harness: Harness) -> Remembered | None:
        """None if nothing is kept, or the drafter has no files."""
        drafter, results = harness.pair.drafter, harness.pair.engine.results
        if not isinstance(drafter, FeatureDrafter) or drafter.origin is None or results is None:
            return None
        try:
            key = reading_key(drafter.origin.files, drafter.origin.declared, harness.pair.target)
        except (OSError, RuntimeError, TypeError):  # weights whose data are elsewhere have no fingerprint
            return None
        return cls(StoredReadings(Path(results.path).parent / FILE), key)

    def get(self, harness: Harness) -> Conventions | None:
        """The stored conventions, if they fit the models."""
        found, drafter, count = self.file.get(self.key), harness.pair.drafter, layer_count(harness.pair.target)
        assert isinstance(drafter, FeatureDrafter)
        if found is None or len(found.feature_layers) != len(drafter.feature_layers):
            return None
        return found if all(-1 <= layer <= count + 1 for layer in found.feature_layers) else None


def settle_reading(harness: Harness, settings: Settings) -> str:
    """Read an ambiguous drafter in the way that predicts the target's text best. Returns what to say about it.

    A reading that an earlier examination found is used again. Ctrl-C ends the examination alone.
    """
    drafter = harness.pair.drafter
    if not isinstance(drafter, FeatureDrafter) or drafter.origin is None:
        return ""
    results = harness.pair.engine.results
    if not drafter.origin.is_ambiguous and not (results and (Path(results.path).parent / FILE).is_file()):
        return ""  # nothing to examine, and nothing that /pair doctor could have found earlier
    remembered = Remembered.of(harness)
    known = None if remembered is None else remembered.get(harness)
    if known is not None:
        if known == drafter.conventions:
            return ""
        drafter.conventions = known
        return f"The drafter is read as an earlier examination found, not as its files declare ({DOCTOR} repeats it)."
    if not drafter.origin.is_ambiguous:
        return ""
    try:
        found = _examined(harness, settings, drafter)
    except KeyboardInterrupt:
        return INTERRUPTED
    except UserError as error:
        return f"How the drafter is read is ambiguous, and could not be examined: {error}"
    if found.better is not None:
        drafter.conventions = found.better.conventions
    if remembered is not None:
        remembered.file.put(remembered.key, drafter.conventions)
    return _sentence(found)


def remember(harness: Harness) -> None:
    """Keep how the drafter is read now for later starts."""
    drafter, kept = harness.pair.drafter, Remembered.of(harness)
    if kept is not None and isinstance(drafter, FeatureDrafter):
        kept.file.put(kept.key, drafter.conventions)


def _examined(harness: Harness, settings: Settings, drafter: FeatureDrafter) -> Diagnosis:
    target, report = harness.pair.target, harness.pair.engine.report
    prompt = harness.prompt_ids(OWN_PROMPT, settings)
    return examine(drafter, target, own_text(target, prompt, LOAD_TOKENS, report), len(prompt), report=report)


def _sentence(found: Diagnosis) -> str:
    """What was found, for the messages of loading."""
    own, used = found.readings[0], found.better or found.readings[0]
    if not found.reads_target:
        return (
            f"The drafter agrees with the target's text at {used.agreement[0]:.2f} of {found.positions} positions, and "
            f"with hidden states of other positions at {found.displaced:.2f}: {DOCTOR} examines it on a longer text."
        )
    if found.better is None:
        return f"How the drafter is read was ambiguous; its files are right (agreement {used.agreement[0]:.2f})."
    depths = range(len(used.agreement))
    place = max(depths, key=lambda index: used.agreement[index] - own.agreement[min(index, len(own.agreement) - 1)])
    before = own.agreement[min(place, len(own.agreement) - 1)]
    which = "" if place == 0 else f" of draft {place + 1}"
    return (
        f"{used.name}: agreement{which} {used.agreement[place]:.2f} against {before:.2f} as declared, at "
        f"{found.positions} positions of the target's own text."
    )

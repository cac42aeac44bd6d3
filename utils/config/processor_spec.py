"""A logits processor by name and arguments, so that settings need no torch.

`utils.comparison.job` makes the processor itself.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessorSpec:
    """The arguments of a processor, or None for those that it lacks. A greedy one ignores its temperature."""

    temperature: float = 1
    top_k: int | None = None
    top_p: float | None = None
    is_greedy: bool = False

    @property
    def name(self) -> str:
        """The name of the processor in /processor."""
        if self.is_greedy:
            return "greedy"
        if self.top_k is not None:
            return "topk" if self.top_p is None else "topknucleus"
        return "multinomial" if self.top_p is None else "nucleus"

    @property
    def arguments(self) -> list[float]:
        """Its arguments in their order."""
        return [value for value in (self.temperature, self.top_k, self.top_p) if value is not None]

    @property
    def effective_temperature(self) -> float:
        """The temperature, which is 0 for a greedy processor."""
        return 0 if self.is_greedy else self.temperature

    def with_temperature(self, temperature: float) -> "ProcessorSpec":
        """With a new temperature. A temperature of 0 is greedy, which has neither top-k nor top-p."""
        return self._changed(temperature, self.top_k, self.top_p)

    def with_top_k(self, top_k: int | None) -> "ProcessorSpec":
        """With a new top-k. A temperature of 0 becomes 1."""
        return self._changed(self._temperature_for(top_k), top_k, self.top_p)

    def with_top_p(self, top_p: float | None) -> "ProcessorSpec":
        """With a new top-p. A temperature of 0 becomes 1."""
        return self._changed(self._temperature_for(top_p), self.top_k, top_p)

    def _temperature_for(self, limit: float | None) -> float:
        return 1 if self.effective_temperature == 0 and limit is not None else self.effective_temperature

    def _changed(self, temperature: float, top_k: int | None, top_p: float | None) -> "ProcessorSpec":
        # An unchanged processor stays as typed: greedy may have a temperature.
        if (temperature, top_k, top_p) == (self.effective_temperature, self.top_k, self.top_p):
            return self
        return GREEDY if temperature == 0 else ProcessorSpec(temperature, top_k, top_p)


GREEDY = ProcessorSpec(is_greedy=True)

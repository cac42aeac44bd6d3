"""What a terminal shows of the text that is written to it."""

from __future__ import annotations


class Terminal:
    """What a terminal shows of a stream: carriage return, erasing to the end of a line, and new lines."""

    def __init__(self, text: str) -> None:
        self.lines, column = [""], 0
        while text:
            if text.startswith("\x1b[K"):
                self.lines[-1], text = self.lines[-1][:column], text[3:]
                continue
            if text.startswith("\x1b["):  # a colour
                text = text[text.index("m") + 1 :]
                continue
            sign, text = text[0], text[1:]
            if sign == "\r":
                column = 0
            elif sign == "\n":
                self.lines.append("")
                column = 0
            else:
                self.lines[-1] = self.lines[-1][:column] + sign + self.lines[-1][column + 1 :]
                column += 1

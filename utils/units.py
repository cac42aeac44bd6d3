"""Numbers of bytes, for people."""


def in_units(size: int) -> str:
    """With three digits, in the largest unit that fits."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 999.5 * unit else f"{size / unit:.0f} {name}"
    return f"{size} bytes"

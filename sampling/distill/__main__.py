"""`python -m sampling.distill`: make a drafter for any target, out of text that the target writes itself."""

import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: see infer.py

from sampling.distill.plan import read_order
from utils.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """Carry out the order of the command line; the exit status: 0, 1 for what a user can mend, 130 interrupted."""
    from utils.printing import make_renderer

    renderer = make_renderer(interactive=False, plain=False)
    try:
        order = read_order(argv)
        from sampling.distill.workshop import Workshop

        workshop = Workshop(order, renderer.note)
        if order.measure:
            workshop.measure()
        else:
            workshop.make()
    except UserError as error:
        renderer.error(str(error))
        return 1
    except KeyboardInterrupt:
        renderer.note("Interrupted: the same command with --resume goes on from here.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

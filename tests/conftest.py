"""Set before torch is imported: a passive wait policy (spinning threads starve a busy machine) and no hub."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

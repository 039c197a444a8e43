"""``python -m legacy_ddp`` is ``legacy-ddp``."""

from legacy_ddp.debug._cli import main

raise SystemExit(main())

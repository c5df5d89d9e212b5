"""Commands. Ctrl-C while one of them still imports its modules ends it with one line."""

import sys

if sys.argv[0] == "-m":  # Python starts a command of this folder; it is not merely imported
    from support.interrupts import leave_at_once

    leave_at_once()

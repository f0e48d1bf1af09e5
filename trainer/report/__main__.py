"""python -m trainer.report RUN_DIRECTORY: write report.html of a run."""

import sys

from trainer.report.run_report import main

main(sys.argv[1:])

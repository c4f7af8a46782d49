"""The report of one or more runs: a self-contained HTML page, or a figure for a paper."""

from longspan.inspection.report.data import RunData, run_data, several
from longspan.inspection.report.page import report_page, write_report

__all__ = ["RunData", "report_page", "run_data", "several", "write_report"]

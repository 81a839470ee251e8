"""``report.html``: one file that shows a run without network or server."""

from cohort.report.page.page import write_report

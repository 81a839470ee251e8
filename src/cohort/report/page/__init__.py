"""``report.html``: one file that shows a run without network or server."""

from cohort.report.page.write import write_report

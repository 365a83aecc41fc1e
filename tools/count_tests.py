"""Prints the closing line of a test run, "N passed, N failed, N skipped", from Meson's test log."""
import json
import sys

counts = {"passed": 0, "failed": 0, "skipped": 0}
with open(sys.argv[1], encoding="utf-8") as log:
    for line in log:
        result = json.loads(line)["result"]
        kind = {"OK": "passed", "EXPECTEDFAIL": "passed", "SKIP": "skipped"}.get(result, "failed")
        counts[kind] += 1
print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
sys.exit(0 if counts["passed"] and not counts["failed"] else 1)

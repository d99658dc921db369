"""Hang detection. Every call to another process is tracked with its target and timeout (`pending_calls`); a watchdog
thread in each process looks for late ones (`detector`). Workers send theirs to the controller through the registry
actor (`registry`), which inspects the processes involved (`process_info`), names the cause and writes a report
(`report`). Imported by cluster, workers and trainer."""

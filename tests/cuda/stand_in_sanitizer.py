#!/usr/bin/env python3
"""Takes compute-sanitizer's place in a rehearsal: checks the options, runs the program."""

import argparse
import subprocess
import sys

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--tool", choices=["memcheck", "racecheck"], required=True)
parser.add_argument("--error-exitcode", type=int, required=True)
parser.add_argument("--print-limit", type=int)
parser.add_argument("--report-api-errors", choices=["no", "explicit", "all"])
parser.add_argument("program", nargs=argparse.REMAINDER)
args = parser.parse_args()
print("========= a stand-in for COMPUTE-SANITIZER", flush=True)
status = subprocess.run(args.program).returncode
kind = "ERROR SUMMARY: 0 errors" if args.tool == "memcheck" else "RACECHECK SUMMARY: 0 hazards"
print(f"========= {kind} displayed")
sys.exit(status)

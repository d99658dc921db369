#!/bin/bash
SCRIPT_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$SCRIPT_DIR/source_env_common.sh"
[ -f "$SCRIPT_DIR/absent.sh" ] && source "$SCRIPT_DIR/absent.sh"
python3 -m verl.trainer.main_ppo "${COMMON[@]}" trainer.default_local_dir="$SCRIPT_DIR/out" "$(describe 3)"

#!/usr/bin/env bash
# Completes command lines in bash, zsh and fish with the scripts of the command. Arguments:
# COMMAND
set -u
. "$(dirname "$0")/expect.sh"

cd "$work" || exit 1
for shell in bash zsh fish; do
  expect 0 completion "$shell"
  cp out "completion.$shell"
done
expect 2 completion tcsh
has err "expected one of bash, zsh, fish"
expect 2 completion
has err "expected bash|zsh|fish"
mkdir files files/folder
touch files/data.txt "files/two words.txt"

# in_bash WORDS...: the completions of the last word, one per line.
in_bash() {
  bash --norc -c '. ./completion.bash
    shift
    COMP_WORDS=(reprise "$@") COMP_CWORD=$#
    _reprise
    printf "%s\n" "${COMPREPLY[@]}"' bash x "$@" 2>&1
}

# in_zsh LINE: the completions of the line's last word, with _main_complete in a terminal.
in_zsh() {
  ZDOTDIR=$work/zsh zsh -f "$work/complete.zsh" "$*" 2>&1
}
mkdir zsh
cp completion.zsh zsh/_reprise
cat >complete.zsh <<'ZSH'
# Types a line into an interactive zsh and prints what the key Tab would offer.
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "PS1= PROMPT= RPROMPT=; stty -echo; unsetopt prompt_sp beep zle_bracketed_paste
fpath=($ZDOTDIR \$fpath); autoload -Uz compinit; compinit -u -d $ZDOTDIR/dump
offered() { compadd() { local -a kept; builtin compadd -O kept \"\$@\"; (( \$#kept )) && printf '<%s>\n' \$kept; builtin compadd \"\$@\" }
_main_complete; compstate[insert]= compstate[list]=; unfunction compadd; print '<end>' }
zle -C offered complete-word offered; bindkey '^I' offered; print '<ready>'"
zpty -r -m shell line '*<ready>*' >/dev/null
zpty -r -m shell line '*<ready>*' >/dev/null
zpty -w -n shell "$1"$'\t'
while zpty -r shell line; do
  print -r -- $line
  [[ $line == *'<end>'* ]] && break
done
zpty -d shell
ZSH

# in_fish LINE: the completions of the line's last word.
in_fish() {
  fish --no-config -c "source $work/completion.fish; complete -C '$*'" 2>&1
}

# offers SHELL TEXT...: completes the words before --, and checks that all words after it are
# offered, and none of those after a second --.
offers() {
  local shell=$1 line=() wanted=()
  shift
  while [ "$1" != : ]; do line+=("$1") && shift; done
  shift
  while [ $# -gt 0 ] && [ "$1" != : ]; do wanted+=("$1") && shift; done
  [ $# -gt 0 ] && shift
  last="$shell: reprise ${line[*]}<Tab>"
  if [ "$shell" = bash ]; then
    in_bash "${line[@]}" >out
  else
    "in_$shell" "reprise ${line[*]}" | sed 's/^.*<\(.*\)>.*$/\1/; s/\t.*//; s/\r//' >out
  fi
  : >err
  for word in ${wanted[@]+"${wanted[@]}"}; do
    grep -qxF -- "$word" out || fail "'$word' is not offered"
  done
  for word in "$@"; do grep -qxF -- "$word" out && fail "'$word' is offered"; done
}

cases() {
  local shell=$1 file=files/data.txt
  [ "$shell" = zsh ] && file=data.txt  # zsh adds the folder itself
  offers "$shell" tr : train : plan --model
  offers "$shell" train --mod : --model : --measure
  offers "$shell" plan --me : --measure --memory : --model
  offers "$shell" train --precision '' : fp32 bf16 fp16 : auto --model
  offers "$shell" plan --precision '' : auto fp32
  offers "$shell" train --model gpt2- : gpt2-medium gpt2-xl : bert-base
  offers "$shell" train --recompute '' : none optimal every: : train
  offers "$shell" train --data files/d : $file
  offers "$shell" train --batch 8 --optimizer ad : adam adamw8bit : sgd
  offers "$shell" train --tf32 --dev : --device
  offers "$shell" study '' : quick mnist
  offers "$shell" completion '' : bash zsh fish : train
  offers "$shell" launch -n 2 -- tr : train
  offers "$shell" launch -n 2 -- train --optimizer sg : sgd : adam
  offers "$shell" devices --format '' : table json
}

cases bash
offers bash '' : train launch plan report completion man
offers bash train --precision = : fp32 bf16
offers bash train --precision = b : bf16 : fp32
offers bash train --data '' : mnist random
offers bash train --data files/ : files/data.txt "files/two words.txt" files/folder
offers bash train --out files/ : files/folder : files/data.txt
offers bash train --compare files/data.txt files/ : files/data.txt
offers bash train --weights nothing : : train
offers bash verify --model tiny-m : tiny-mlp

# Every flag of every subcommand is completed, with every value that --help names.
expect 0 --help
mapfile -t commands < <(sed -n '/^Subcommands:/,/^$/s/^  \([a-z]*\) .*/\1/p' out)
[ ${#commands[@]} -ge 10 ] || fail "--help has ${#commands[@]} subcommands"
for command in "${commands[@]}"; do
  expect 0 "$command" --help
  mapfile -t flags < <(grep -oE '^  (-[a-z],)?--[a-z0-9-]+' out | grep -oE -- '--.*')
  mapfile -t valued < <(grep -oE '^  --[a-z0-9-]+ [a-z0-9]+(\|[a-z0-9-]+)+' out)
  cp out help
  offers bash "$command" -- : "${flags[@]}"
  for line in "${valued[@]}"; do
    read -r flag values <<<"$line"
    mapfile -t values < <(tr '|' '\n' <<<"$values")
    offers bash "$command" "$flag" '' : "${values[@]}"
  done
done

for shell in zsh fish; do
  command -v $shell >/dev/null || {
    echo "SKIPPED: completion in $shell, which is not installed"
    continue
  }
  cases $shell
done

finish "completion"

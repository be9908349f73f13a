# The entry point of the image with all services. Without a command of `quire`, it serves a model: `run IMAGE --model NAME`.
case "${1-}" in
"" | -*) exec quire up --no-detach --host 0.0.0.0 --port 8000 "$@" ;;
*) exec quire "$@" ;;
esac

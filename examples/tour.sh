# Every verb of milpactl on the pods of the demo: make demo-shell < examples/tour.sh
examples=$PWD/examples
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

# Prints a command, runs it without this script on its input, and prints an exit code that is not 0.
run() {
    printf '\n$ %s\n' "$*"
    timeout 30 sh -c "$*" 2>&1 < /dev/null
    code=$?
    [ "$code" = 0 ] || echo "(exit code $code)"
}

# Waits until a command succeeds, for a minute at most.
wait_until() {
    timeout 60 sh -c "until $*; do sleep 0.1; done" || echo "not within a minute: $*"
}

cat > alone.yaml <<'EOF'
apiVersion: v1
kind: Pod
metadata:
  name: alone
  labels: {app: alone}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: docker.io/library/busybox:1.36
    command: ["sh", "-c", "echo \"${#TOKEN} characters\"; exec sleep 86400"]
    env:
    - {name: TOKEN, value: sesame}
EOF

run milpactl version
run milpactl get pods
run milpactl get pods -l app=example -o name
run milpactl get cells -o wide
run milpactl get nodes
run milpactl get events
run milpactl get metrics
run milpactl get usage
run milpactl get backends
run milpactl get offerings
run milpactl get pools
run milpactl get pod pod-in-a-cell -oyaml
run "milpactl get pod pod-in-a-cell -ojson | head -12"
cell=$(milpactl get cells -o wide | awk '/pod-in-a-cell/ { print $1 }')
run milpactl describe pod pod-in-a-cell
run milpactl describe cell "$cell"
run milpactl logs pod-in-a-cell
run milpactl logs pod-in-a-cell -u main --since 10m
run "timeout 1 milpactl logs pod-in-a-cell -f --lines 1"
run milpactl logs "$cell" --lines 1
run "milpactl exec pod-in-a-cell -- sh -c 'hostname; exit 3'"
run "echo from a pipe | milpactl exec -i pod-in-a-cell -- cat"
run "script -qec 'milpactl exec -it pod-in-a-cell -- tty' /dev/null"
run "timeout 1 milpactl attach pod-in-a-cell"
run "milpactl exec pod-in-a-cell -- sh -c 'cd /scratch; echo served > index.html; httpd -p 8080'"
printf '\n$ milpactl port-forward pod-in-a-cell 18080:8080 & curl http://127.0.0.1:18080/\n'
touch forwarded
timeout 3 milpactl port-forward pod-in-a-cell 18080:8080 > forwarded &
wait_until grep -q Forwarding forwarded
curl -s http://127.0.0.1:18080/
wait
cat forwarded
cp "$examples/pod-in-a-cell.yaml" .
run milpactl plan -f pod-in-a-cell.yaml
run milpactl plan -f alone.yaml
run milpactl create -f alone.yaml
wait_until "milpactl logs alone-demo 2>/dev/null | grep -q characters"
run milpactl get pods
run "timeout 1 milpactl get pod alone-demo --watch"
run milpactl logs alone-demo
run milpactl top --once
run milpactl pool
run milpactl delete alone
run milpactl delete alone
run milpactl create -f pod-in-a-cell.yaml
run milpactl get pod pod-in-a-cel
run milpactl get pods -o xml
run milpactl deploy web
run milpactl update web
run milpactl get services
run milpactl get secrets
run milpactl --socket /run/absent.sock get pods
run milpactl cordon
run milpactl get backends
run milpactl uncordon
run milpactl dump all --output dump.tar
run tar tvf dump.tar
run "milpactl dump all | head -7"
run "milpactl completion bash | head -3"
run "milpactl man | man -l - | head -5"
run "curl -s $DEMO_METRICS | grep -v -e ' 0$' -e ' 0.0$' -e '^#' -e _bucket"
run milpactl drain --end --timeout 20s
run milpactl get cells
run milpactl uncordon

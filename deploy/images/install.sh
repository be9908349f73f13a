# The steps of the Containerfile, in /parts. /dist is the folder of `make wheels`.
set -eu
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1

# A pip outside of the environments, which thus need none.
pip_of_build() {
    /parts/build/bin/python3 -m pip "$@"
}

into_environment() {
    pip_of_build --python /opt/quire/bin/python3 install --quiet --only-binary :all: \
        --constraint /parts/constraints.txt "$@"
}

# pip's options for a wheelhouse, with which it asks no index; nothing if there is none.
wheelhouse() {
    if [ -d "$1" ]; then echo "--no-index --find-links $1"; fi
}

step=$1
shift
case "$step" in
packages) # downloads all but torch, each by its hash
    python3 -m venv /parts/build
    # shellcheck disable=SC2046  # several words
    pip_of_build download --quiet $(wheelhouse /dist/wheelhouse) --only-binary :all: --no-deps --require-hashes \
        --requirement /parts/requirements.lock --dest /parts/packages
    ;;
torch) # torch's CPU build, by its version
    source=$(wheelhouse /dist/wheelhouse)
    if [ -z "$source" ]; then source="--index-url $TORCH_INDEX"; fi
    # shellcheck disable=SC2086  # several words
    pip_of_build download --quiet $source --only-binary :all: --no-deps --constraint /parts/constraints.txt \
        --dest /parts/packages torch
    ;;
environment) # makes /opt/quire of our distributions, named as NAME or NAME[EXTRA], and lists all that the image contains
    image=$1
    shift
    if [ -n "${WITH_PIP-}" ]; then pip=""; else pip="--without-pip"; fi
    python3 -m venv $pip /opt/quire
    verified="--no-index --find-links /parts/packages"
    if [ -n "${WITH_CUDA-}" ]; then
        # What torch requires beside CUDA comes from here; pip then takes torch and CUDA alone from elsewhere.
        # shellcheck disable=SC2086
        into_environment $verified filelock typing-extensions setuptools sympy networkx jinja2 fsspec
        # shellcheck disable=SC2046
        into_environment $(wheelhouse /dist/wheelhouse-cuda) torch
    fi
    # Files, so that no index is asked for our names.
    wheels=$(ls /parts/quire-[0-9]*.whl /parts/quire_common-*.whl)
    for name in "$@"; do
        extra=${name#"${name%%\[*}"}
        wheels="$wheels $(ls /parts/"${name%%\[*}"-[0-9]*.whl)$extra"
    done
    # shellcheck disable=SC2086
    into_environment $verified $wheels
    /opt/quire/bin/python3 /parts/sbom.py "$image" > /opt/quire/sbom.cdx.json
    ;;
user) # the user of all services, and the folders that it may write
    echo "quire:x:65532:65532:Quire:/home/quire:/usr/sbin/nologin" >> /etc/passwd
    echo "quire:x:65532:" >> /etc/group
    # A volume that is mounted there belongs to whom the folder belongs to. deploy/compose mounts those of secrets.
    install -d -m 700 -o 65532 -g 65532 /home/quire /var/cache/quire /var/lib/quire /var/lib/quire/pages
    for name in authority redis router tokenizer scheduler worker kvstore balancer metrics; do
        install -d -m 700 -o 65532 -g 65532 /var/lib/quire/secrets/$name
    done
    ;;
compiler) # a C compiler and Python's headers
    apt-get update -qq
    headers=$(python3 -c "import sysconfig; print(sysconfig.get_paths()['include'] + '/Python.h')")
    if [ -e "$headers" ]; then python=""; else python="libpython3-dev"; fi
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends gcc libc6-dev $python
    apt-get clean
    rm -rf /var/lib/apt/lists/*
    test -e "$headers"
    ;;
*)
    echo "unknown step $step" >&2
    exit 2
    ;;
esac

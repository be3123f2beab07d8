#!/usr/bin/env bash
# Sets the project up: virtual environment, dependencies, Java. Installs system packages only
# where it may (root, or sudo without a password); elsewhere it says in one sentence what to do.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}

fail() {
    echo "setup: $*" >&2
    exit 1
}

# Installs the first of the named Debian packages that this release has.
install_one_of() {
    local root=()
    command -v apt-get >/dev/null || return 1
    if [ "$(id -u)" -ne 0 ]; then
        sudo -n true 2>/dev/null || return 1
        root=(sudo -n)
    fi
    "${root[@]}" apt-get update -qq || return 1
    local package
    for package in "$@"; do
        if "${root[@]}" env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends "$package"; then
            return 0
        fi
    done
    return 1
}

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

if [ ! -x "$venv/bin/pip" ]; then
    python=$(find_python) || fail "Python 3.11 or newer is needed: install it and run make again."
    # Debian's python3 leaves venv out.
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "setup: installing python3-venv"
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        install_one_of "python$version-venv" python3-venv ||
            fail "$python cannot make virtual environments: run apt-get install python3-venv as root."
    fi
    "$python" -m venv "$venv"
fi

# Dependency groups need pip 25.1; what a fresh Debian brings is older.
if ! "$venv/bin/pip" install --help | grep -q -- --group; then
    "$venv/bin/pip" install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
fi
"$venv/bin/pip" install --quiet --disable-pip-version-check --editable . --group dev

have_java() {
    "$venv/bin/python" -c 'from anabranch.spark.java import find_java; find_java()' 2>/dev/null
}
if ! have_java; then
    echo "setup: installing Java"
    install_one_of openjdk-17-jre-headless openjdk-21-jre-headless && have_java ||
        fail "Java 17 or newer is needed: run apt-get install openjdk-17-jre-headless as root, or set JAVA_HOME."
fi

#!/bin/sh
# Builds the emulated processor of `make test-amx`: build.sh BOCHS FOLDER
#
# BOCHS is a folder with Bochs' sources (of 2026; 3.0 works if it has cpu/avx/amx.cc), which are copied. Their
# TDPBSSD, TDPBSUD and TDPBUSD take bytes without a sign where Intel's manual has them with one: `signs.py`
# mends that in the copy, and says so if there is nothing to mend.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
sources=$(cd "$1" && pwd)
mkdir -p "$2"
folder=$(cd "$2" && pwd)
bochs=$folder/bochs
flags="-O1 -w -fPIC"
if [ ! -f "$folder/patched" ]; then
    rm -rf "$bochs"
    cp -r "$sources" "$bochs"
    for part in bios docs-html doc/docbook doc/man; do  # not always there, and not needed
        mkdir -p "$bochs/$part"
        [ -f "$bochs/$part/Makefile.in" ] || : > "$bochs/$part/Makefile.in"
    done
    (cd "$bochs" && CFLAGS=$flags CXXFLAGS=$flags ./configure --enable-cpu-level=6 --enable-x86-64 \
        --enable-avx --enable-evex --enable-amx --with-nogui --disable-plugins \
        --enable-instrumentation=instrument/stubs > "$folder/configure.log" 2>&1)
    python3 "$here/signs.py" "$bochs/cpu/avx/amx.cc"
    : > "$folder/patched"
fi
for part in . avx cpudb fpu softfloat3e; do
    make -s -j"$(nproc)" -C "$bochs/cpu/$part" CXX="g++ -fPIC" CXXFLAGS="$flags" > "$folder/make.log" 2>&1
done
compile() {  # source, object, flags
    g++ -std=c++17 $flags $3 -I"$bochs" -I"$bochs/instrument/stubs" -c "$1" -o "$folder/$2"
}
compile "$here/emulator.cpp" emulator.o "-fpermissive -Dprivate=public -Dprotected=public"
compile "$bochs/gui/paramtree.cc" paramtree.o ""
compile "$bochs/instrument/stubs/instrument.cc" instrument.o ""
objcopy --weaken "$folder/instrument.o"
cd "$folder"
g++ -shared -pthread -o libemulator.so emulator.o paramtree.o instrument.o \
    -Wl,--start-group "$bochs/cpu/libcpu.a" "$bochs"/cpu/*/*.a -Wl,--end-group -Wl,-z,defs
echo "$folder/libemulator.so"

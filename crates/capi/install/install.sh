#!/usr/bin/env bash
# Installs the libraries for C and C++, or removes them: install.sh install|uninstall
# Reads from the environment: RELEASE (where the libraries were built), VERSION, SONAME, STRIP, DESTDIR, PREFIX, LIBDIR,
# INCLUDEDIR and DOCDIR. Both functions must name the same files; tests/test_cpp_install.py checks that an uninstall leaves
# nothing.
set -euo pipefail
cd "$(dirname "$0")/../../.."

for name in PREFIX LIBDIR INCLUDEDIR DOCDIR; do
	[[ ${!name} = /* ]] || { echo "$name must be an absolute path: $name=${!name}" >&2; exit 2; }
done
library="$DESTDIR$LIBDIR" include="$DESTDIR$INCLUDEDIR" doc="$DESTDIR$DOCDIR"
headers=(llm_datadist hixl adxl)
pkgconfig="$library/pkgconfig" cmake="$library/cmake/llm_datadist"

# The installed files find each other by relative paths, so that the tree can be moved as a whole.
filled() {
	sed -e "s|@VERSION@|$VERSION|; s|@SONAME@|$SONAME|" \
		-e "s|@PREFIX_FROM_PKGCONFIG@|$(relative "$PREFIX" "$LIBDIR/pkgconfig")|" \
		-e "s|@INCLUDE_FROM_PKGCONFIG@|$(relative "$INCLUDEDIR" "$LIBDIR/pkgconfig")|" \
		-e "s|@INCLUDE_FROM_CMAKE@|$(relative "$INCLUDEDIR" "$LIBDIR/cmake/llm_datadist")|" "$1"
}

relative() {
	realpath --canonicalize-missing --no-symlinks --relative-to="$2" "$1"
}

install_all() {
	install -d "${headers[@]/#/$include/}" "$pkgconfig" "$cmake" "$doc"
	install -m 644 LICENSE "$RELEASE/THIRD-PARTY-LICENSES" "$doc"
	for folder in "${headers[@]}"; do
		install -m 644 crates/capi/include/"$folder"/*.h "$include/$folder"
	done
	install -m 644 "$RELEASE/libllm_datadist.a" "$library"
	install -m 755 "$RELEASE/libllm_datadist.so" "$library/libllm_datadist.so.$VERSION"
	"$STRIP" --strip-debug "$library/libllm_datadist.a"
	"$STRIP" --strip-unneeded "$library/libllm_datadist.so.$VERSION"
	ln -sfn "libllm_datadist.so.$VERSION" "$library/$SONAME"
	ln -sfn "$SONAME" "$library/libllm_datadist.so"
	filled crates/capi/install/llm_datadist.pc.in > "$pkgconfig/llm_datadist.pc"
	for file in llm_datadistConfig llm_datadistConfigVersion; do
		filled "crates/capi/install/$file.cmake.in" > "$cmake/$file.cmake"
	done
}

uninstall_all() {
	rm -f "$doc/LICENSE" "$doc/THIRD-PARTY-LICENSES"
	for header in crates/capi/include/*/*.h; do
		rm -f "$include/${header#crates/capi/include/}"
	done
	rm -f "$library/libllm_datadist.a" "$library/libllm_datadist.so" "$library/$SONAME" "$library/libllm_datadist.so.$VERSION"
	rm -f "$pkgconfig/llm_datadist.pc" "$cmake/llm_datadistConfig.cmake" "$cmake/llm_datadistConfigVersion.cmake"
	# Remove our own folders if they are empty.
	for folder in "${headers[@]/#/$include/}" "$cmake" "$doc"; do
		rmdir "$folder" 2> /dev/null || true
	done
}

case ${1-} in
install)
	install_all
	echo "llm_datadist $VERSION is installed in $library and $include"
	if [ -z "$DESTDIR" ] && [ "$(id -u)" = 0 ]; then
		echo "Run ldconfig if $LIBDIR is one of the dynamic linker's folders."
	fi
	;;
uninstall)
	uninstall_all
	echo "llm_datadist $VERSION is removed from $library and $include"
	;;
*)
	echo "usage: install.sh install|uninstall" >&2
	exit 2
	;;
esac

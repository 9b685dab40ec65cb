"""Checks the files of packages: one version, valid syntax, and only options that exist.

    package_files_test.py SOURCE-DIR BUILD-DIR
"""
import ast
import json
import pathlib
import re
import subprocess
import sys

ROOT, BUILD = (pathlib.Path(argument).resolve() for argument in sys.argv[1:3])
ISO_DATE = r"\d{4}-\d{2}-\d{2}"
# Keys that the format 1.2.0 of citation files requires, and what their values look like.
CITATION_KEYS = {
    "cff-version": r"1\.2\.0",
    "message": r"\S.*",
    "title": r"\S.*",
    "type": "software",
    "authors": "",
    "version": r"\d+\.\d+\.\d+",
    "date-released": ISO_DATE,
    "license": r"[A-Za-z0-9.-]+",
}


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def version():
    return re.search(r'^#define REPRISE_VERSION "(\d+\.\d+\.\d+)"$',
                     text_of("include/reprise/version.h"), re.MULTILINE)[1]


def top_level(text):
    """Keys and plain values at the top level of a YAML file of the simplest kind."""
    values = {}
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"(\s|-|#|$)", line):
            continue
        found = re.fullmatch(r"([a-z-]+):(?: (.*))?", line)
        assert found, f"CITATION.cff, line {number}: expected KEY: VALUE, got {line}"
        key, value = found[1], found[2] or ""
        assert key not in values, f"CITATION.cff, line {number}: {key} is given twice"
        quoted = re.fullmatch(r'"([^"\\]*)"', value)
        assert quoted or not re.search(r": | #|^[&*!%@`\[{'\"]", value), (
            f"CITATION.cff, line {number}: the value needs quotes")
        values[key] = quoted[1] if quoted else value
    return values


def check_citation():
    text = text_of("CITATION.cff")
    values = top_level(text)
    for key, pattern in CITATION_KEYS.items():
        assert key in values, f"CITATION.cff has no {key}"
        assert re.fullmatch(pattern, values[key]), f"CITATION.cff: {key} is {values[key]}"
    authors = re.search(r"^authors:\n((?: .*\n)+)", text, re.MULTILINE)
    assert authors and re.match(r"  - (name|family-names): \S", authors[1]), "no authors"
    assert values["version"] == version(), f"CITATION.cff has {values['version']}"
    return values["date-released"]


def check_changelog(date):
    headings = re.findall(r"^## \[(.+)\](?: - (.+))?$", text_of("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == ("Unreleased", ""), f"CHANGELOG.md begins with {headings[0]}"
    assert headings[1] == (version(), date), (
        f"CHANGELOG.md has {headings[1]}, CITATION.cff {version()} of {date}")
    for _, day in headings[1:]:
        assert re.fullmatch(ISO_DATE, day), f"CHANGELOG.md: expected a date, got {day}"


def check_vcpkg():
    port = "packaging/vcpkg/ports/reprise/"
    manifest = json.loads(text_of(port + "vcpkg.json"))
    assert manifest["version-semver"] == version(), f"vcpkg.json: {manifest['version-semver']}"
    used = re.findall(r"FEATURES (\w+)", text_of(port + "portfile.cmake"))
    assert used == list(manifest["features"]), f"portfile.cmake: features {used}"


def check_conan():
    """The recipe reads its version from the header, in the same way as this test."""
    recipe = text_of("packaging/conan/conanfile.py")
    ast.parse(recipe)
    assert '#define REPRISE_VERSION "' in recipe
    patterns = re.search(r"for pattern in \((.*?)\):", recipe, re.DOTALL)[1]
    for pattern in re.findall(r'"([^"]+)"', patterns):
        assert any(ROOT.glob(pattern)), f"conanfile.py exports {pattern}, which is nothing"


def check_options():
    """Every REPRISE_ option that a package passes to CMake is one of the project's."""
    lists = [ROOT / "CMakeLists.txt", *ROOT.glob("cmake/*.cmake"),
             *ROOT.glob("src/**/CMakeLists.txt")]
    known = set()
    for path in lists:
        known |= set(re.findall(r"(?:option\(|set\()(REPRISE_\w+)[^)]*?(?:\"|CACHE)",
                                path.read_text(encoding="utf-8")))
    passed = {
        "portfile.cmake": re.findall(r"-D(REPRISE_\w+)=|tools (REPRISE_\w+)\)",
                                     text_of("packaging/vcpkg/ports/reprise/portfile.cmake")),
        "conanfile.py": re.findall(r'cache_variables\["(REPRISE_\w+)"\]()',
                                   text_of("packaging/conan/conanfile.py")),
        "Dockerfile": re.findall(r"-D(REPRISE_\w+)=()", text_of("packaging/Dockerfile")),
        "README.md": re.findall(r"-D(REPRISE_\w+)=()", text_of("README.md")
                                + text_of("packaging/README.md")),
    }
    for name, found in passed.items():
        options = {first or second for first, second in found}
        assert len(options) >= 2, f"{name} passes {options}"
        assert options <= known, f"{name} passes {options - known}, which do not exist"


def check_dockerfile():
    """It installs what scripts/setup.sh installs for a build."""
    text = text_of("packaging/Dockerfile")
    setup = re.search(r"install_build_tools\(\) \{(.*?)\n\}", text_of("scripts/setup.sh"),
                      re.DOTALL)[1]
    words = re.findall(r"packages\+?=\(([^)]*)\)", setup)
    assert len(words) == 2, "scripts/setup.sh has another form"
    for package in " ".join(words).split():
        assert re.search(rf"(?<!\S){re.escape(package)}(?!\S)", text), (
            f"Dockerfile does not install {package}")
    stages = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert stages == ["debian:12-slim"] * 2, f"Dockerfile: stages {stages}"


def check_cpack():
    config = (BUILD / "CPackConfig.cmake").read_text(encoding="utf-8")
    found = re.search(r'^set\(CPACK_PACKAGE_VERSION "(.*)"\)$', config, re.MULTILINE)
    assert found and found[1] == version(), f"CPackConfig.cmake: {found and found[1]}"
    for name in ("reprise", "libreprise-dev"):
        assert f'_PACKAGE_NAME "{name}")' in config, f"CPackConfig.cmake has no {name}"


def check_scripts():
    for path in ROOT.glob("packaging/*.sh"):
        subprocess.run(["bash", "-n", path], check=True)


def check_links():
    for name in ("CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md", "packaging/README.md"):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text_of(name)):
            assert (ROOT / name).parent.joinpath(link).exists(), f"{name}: no {link}"


def main():
    check_changelog(check_citation())
    for check in (check_vcpkg, check_conan, check_options, check_dockerfile, check_cpack,
                  check_scripts, check_links):
        check()
    print(f"packages: all files are of version {version()}")


if __name__ == "__main__":
    main()

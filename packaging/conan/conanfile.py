"""Conan 2 recipe of Reprise. In the root of the sources:

    conan create packaging/conan --build=missing
"""
import os

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load


class RepriseConan(ConanFile):
    name = "reprise"
    description = "Gradient checkpointing and accumulation for LibTorch, within a memory budget"
    license = "Apache-2.0"
    topics = ("deep-learning", "pytorch", "gradient-checkpointing")
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False], "tools": [True, False]}
    default_options = {"shared": False, "tools": True}

    @property
    def _root(self):
        """The sources: two folders up from the recipe, or where Conan exported them."""
        exported = os.path.join(self.recipe_folder, "CMakeLists.txt")
        if os.path.isfile(exported):
            return self.recipe_folder
        return os.path.normpath(os.path.join(self.recipe_folder, "..", ".."))

    def set_version(self):
        header = load(self, os.path.join(self._root, "include/reprise/version.h"))
        self.version = header.split('#define REPRISE_VERSION "')[1].split('"')[0]

    def export(self):
        copy(self, "version.h", os.path.join(self._root, "include/reprise"),
             os.path.join(self.export_folder, "include/reprise"))

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "CHANGELOG.md", "cmake/*", "include/*",
                        "packaging/debian/*", "scripts/*", "src/*", "studies/*", "tools/*",
                        "web/*"):
            copy(self, pattern, self._root, self.export_sources_folder,
                 excludes="web/node_modules/*")

    def layout(self):
        cmake_layout(self)

    def requirements(self):
        self.requires("libtorch/[>=1.13 <3]", transitive_headers=True, transitive_libs=True)
        self.requires("fmt/[>=9]")
        self.requires("nlohmann_json/[>=3.10 <4]")
        self.requires("yaml-cpp/[>=0.7 <1]")
        self.requires("zlib/[>=1.2.11 <2]")
        if self.options.tools:
            self.requires("cli11/[>=2.1 <3]")

    def validate(self):
        check_min_cppstd(self, 20)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["REPRISE_BUILD_TESTS"] = False
        toolchain.cache_variables["REPRISE_BUILD_BENCH"] = False
        toolchain.cache_variables["REPRISE_BUILD_TOOLS"] = bool(self.options.tools)
        # An absent page is allowed; REPRISE_PAGE names one that scripts/page.sh made.
        toolchain.cache_variables["REPRISE_PAGE"] = os.environ.get("REPRISE_PAGE", "")
        toolchain.generate()
        CMakeDeps(self).generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        copy(self, "notices.txt", os.path.join(self.source_folder, "web"),
             os.path.join(self.package_folder, "licenses"))
        CMake(self).install()

    def package_info(self):
        # The project's own CMake files define reprise::core and the other components.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [os.path.join("lib", "cmake", "reprise")]

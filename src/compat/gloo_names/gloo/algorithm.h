#pragma once

// The header of c10d's Gloo backend refers to types of Gloo, whose headers are
// not part of LibTorch packages. These files declare the names that are needed
// to compile that header. Reprise creates no objects of these types: transport
// devices are created by c10d and passed back to it.

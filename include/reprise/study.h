#pragma once

/// The library reprise::study: studies, device observers and the report, and reprise::train.

#include <reprise/observe/devices.h>
#include <reprise/observe/observer.h>
#include <reprise/observe/probe.h>
#include <reprise/report/report.h>
#include <reprise/study/runner.h>
#include <reprise/study/study_file.h>
#include <reprise/train.h>

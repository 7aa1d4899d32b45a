module evergrad.test/tools/pause

go 1.24.0

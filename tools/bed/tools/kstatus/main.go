// Prints what kstatus calls each object of a JSON list on its standard input: a JSON list of status and message.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
)

type answer struct {
	Status  string `json:"status"`
	Message string `json:"message"`
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "kstatus:", err)
		os.Exit(1)
	}
}

func run() error {
	var texts []json.RawMessage
	if err := json.NewDecoder(os.Stdin).Decode(&texts); err != nil {
		return err
	}
	answers := make([]answer, 0, len(texts))
	for number, text := range texts {
		// Whole numbers are read as 64-bit integers, as the API machinery reads them.
		object := &unstructured.Unstructured{}
		if err := object.UnmarshalJSON(text); err != nil {
			return fmt.Errorf("object %d: %w", number, err)
		}
		found, err := status.Compute(object)
		if err != nil {
			return fmt.Errorf("object %d: %w", number, err)
		}
		answers = append(answers, answer{string(found.Status), found.Message})
	}
	return json.NewEncoder(os.Stdout).Encode(answers)
}
